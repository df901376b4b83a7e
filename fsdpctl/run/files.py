"""Names of the files in a run directory, besides its configuration and checkpoints."""

RUNS = "runs"  # the folder of runs without a given directory
OVERRIDES, METRICS, LOGS = "overrides.txt", "metrics.jsonl", "logs"
LOG = f"{LOGS}/node-00000.log"
LOCK = "lock"
HEARTBEAT, ENVIRONMENT = "heartbeat.json", "environment.json"
TENSORBOARD, WANDB_ID = "tensorboard", "wandb-id.txt"
