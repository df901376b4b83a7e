"""What configurations of other tools mean in our words. Nothing of theirs is executed."""
