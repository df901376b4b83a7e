"""From the words a person types to typed, checked values. Nothing here imports torch."""
