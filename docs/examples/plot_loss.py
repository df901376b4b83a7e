"""Plots the losses of a run, from its metrics.jsonl to a picture: plot_loss.py SOURCE TARGET."""

import json
import sys

from matplotlib import pyplot as plt

source, target = sys.argv[1:]
with open(source, encoding="utf-8") as file:
    lines = [json.loads(line) for line in file]
steps = [each for each in lines if "loss" in each]
validations = [each for each in lines if "val_loss" in each]

plt.switch_backend("agg")
plt.rcParams["svg.fonttype"] = "none"  # keeps text as text, so an SVG file is small
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained", facecolor="white")
axes.plot([e["step"] for e in steps], [e["loss"] for e in steps], lw=0.8, label="training")
axes.plot([e["step"] for e in validations], [e["val_loss"] for e in validations], "o-", ms=4,
          label="validation")  # fmt: skip
axes.set(xlabel="step", ylabel="loss, nats per token")
axes.legend()
figure.savefig(target)
