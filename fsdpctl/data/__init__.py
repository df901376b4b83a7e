"""Token streams, and which samples of them a step sees. Order and position are arithmetic."""
