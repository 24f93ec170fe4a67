"""The page of `trainwright watch --web`: on loopback, behind a token, with nothing from outside."""
