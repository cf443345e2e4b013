"""`local2 stories`: the acceptance stories, and what runs and checks them."""
