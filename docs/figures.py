"""The figures of docs/evidence.md, each in a phrase, from the results of a benchmark."""

from typing import Any


def faults(report: dict[str, Any]) -> str:
    """Return how many injected faults led to wrong results."""
    wrong = sum(1 for each in report["results"] if each["wrong"])
    return f"{wrong} of {len(report['results'])} injected faults led to wrong results"


def damage(report: dict[str, Any]) -> str:
    """Return how many corrupted checkpoints led to wrong results."""
    cases = [each for each in report["results"] if each["what"] == "newest checkpoint"]
    wrong = sum(1 for each in cases if each["wrong"])
    return f"{wrong} of {len(cases)} corrupted checkpoints led to wrong results"


def hangs(report: dict[str, Any]) -> str:
    """Return what hang detection costs."""
    ratio = report["results"]["time_over_unwatched"]
    return f"a watched step takes {ratio:.3f} times as long as an unwatched one"


def loading(report: dict[str, Any]) -> str:
    """Return a rank's peak while it loads, by the number of ranks."""
    shares = [
        f"{each['peak_mib'] / each['model_mib']:.2f} with {each['ranks']}"
        for each in report["results"]
        if each["by"] == "fsdpctl"
    ]
    return f"peak while loading / model: {', '.join(shares)} ranks"


def peak(report: dict[str, Any]) -> str:
    """Return the peak of each strategy relative to PyTorch's engines."""
    ratios = [value for each in report["results"] for key, value in each.items() if "_over_" in key]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times PyTorch's peak"


def sent(report: dict[str, Any]) -> str:
    """Return the difference between predicted and sent bytes."""
    errors = [abs(e["sent_error"]) for e in report["results"] if e["sent_error"] is not None]
    return f"at most {max(errors):.1%} from the prediction in {len(errors)} runs"


def small(report: dict[str, Any]) -> str:
    """Return the errors of the estimated peak on CPU ranks."""
    small = report["results"]["small"]
    number = sum(each["configurations"] for each in small)
    worst = max(each["worst_error"] for each in small)
    return f"peak of all tensors at most {worst:.2%} off in {number} runs"


def published(report: dict[str, Any]) -> str:
    """Return the errors of estimates of published memory."""
    errors = [abs(each["error"]) for each in report["results"]["published"]]
    return f"at most {max(errors):.1%} off in {len(errors)} measurements on H100"


def steps(report: dict[str, Any]) -> str:
    """Return the errors of predictions of published step times."""
    median, worst = report["median_error"], report["worst_error"]
    return f"{median:.1%} off (median), {worst:.1%} at most, in {len(report['results'])} runs"


def growth(report: dict[str, Any]) -> str:
    """Return the growth of a rank over a long run."""
    first, *later = report["results"]
    last, largest = later[-1], max(each["over_first"] for each in later) - 1
    return (
        f"{last['over_first'] - 1:+.1%} from step {first['step']:,} to step {last['step']:,}, "
        f"{largest:+.1%} at most between them"
    )


def restarting(report: dict[str, Any]) -> str:
    """Return the time of a restart."""
    ratio = report["results"]["restart_over_start"]
    return (
        f"the time from a killed rank to the next step is {ratio:.2f} of that from the command to "
        "the first step"
    )


def decoders(report: dict[str, Any]) -> str:
    """Return the difference of losses from those of transformers."""
    works = [e for e in report["results"] if e["is_tried"] and not e["problem"]]
    worst = max(each["loss_difference"] for each in works)
    return f"losses of {len(works)} families differ by at most {worst:.0e}"


def startup(report: dict[str, Any]) -> str:
    """Return the time of help and of a large estimate."""
    (found,) = report["results"]
    return (
        f"`--help` takes {found['help_over_import_typer']:.2f} times the processor time of `import "
        f"typer`, the estimate of 405B on 16,384 GPUs {found['estimate_over_import_torch']:.1f} "
        "times that of `import torch`"
    )
