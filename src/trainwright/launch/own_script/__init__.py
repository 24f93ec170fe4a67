"""A user's own training script in place of the built-in trainer: started, followed, checked and resumed."""
