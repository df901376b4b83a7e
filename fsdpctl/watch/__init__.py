"""What is told of a run while it goes on, and how others see from it whether it lives."""
