"""What a run was asked, decided and measured, on one page; and which runs there are."""
