"""The training that `--budget` buys with each variant."""

from collections.abc import Iterator, Sequence

from fsdpctl.commands.compare.report import OK, VariantResult
from fsdpctl.io.texts import three_digits

_HOUR = 3600


def add_budget(rows: Sequence[VariantResult], budget: float) -> None:
    """Add the steps and tokens that `budget` buys to each variant that fits and has a price."""
    for row in rows:
        if row.status == OK and row.price and row.step_seconds and row.world_size:
            step_cost = row.price * row.world_size * row.step_seconds / _HOUR
            row.budget_steps = int(budget / step_cost)
            tokens = (row.tokens_per_second or 0.0) * row.step_seconds
            row.budget_tokens = round(row.budget_steps * tokens)


def budget_lines(rows: Sequence[VariantResult], budget: float) -> Iterator[str]:
    """Yield lines about the cheapest variant that ends within `budget`, and about other variants.

    For each other variant that fits, a line has the tokens that `budget` buys, the most first.
    """
    money, fitting = f"{budget:,g}", [row for row in rows if row.status == OK]
    ending = [row for row in fitting if row.cost is not None and row.cost <= budget]
    best = min(ending, key=lambda row: row.cost or 0.0, default=None)
    if best is not None:
        text = f"the cheapest that fits and is predicted to end within {money}"
        yield f"budget  {best.label}: {text}, {_cost(best)}"
    elif any(row.cost is not None for row in fitting):
        yield f"budget  no variant that fits is predicted to end within {money}"
    bought = [row for row in fitting if row.budget_tokens is not None and row is not best]
    for row in sorted(bought, key=lambda row: -(row.budget_tokens or 0)):
        hours = three_digits((row.budget_steps or 0) * (row.step_seconds or 0.0) / _HOUR)
        yield (
            f"{money} buys  {row.label}: {_tokens(row)}, {row.budget_steps:,} steps in {hours} "
            f"hours{_against_cost(row, budget)}"
        )
    for row in fitting:
        if row.price is None:
            yield f"price   {row.label}: unknown; set cluster.price"


def _tokens(row: VariantResult) -> str:
    return f"{(row.budget_tokens or 0) / 1e9:.3g} B tokens"


def _cost(row: VariantResult) -> str:
    assert row.cost is not None
    text = f"cost {three_digits(row.cost)}"
    if row.error_band is None:
        return text
    band = row.error_band
    low, high = (three_digits(row.cost * each) for each in (band.low, band.high))
    return f"{text} ({low} to {high})"


def _against_cost(row: VariantResult, budget: float) -> str:
    if not row.cost:
        return ""
    share = f"{budget / row.cost:.0%} of the run" if row.cost > budget else "more than the run"
    return f", {share}: {_cost(row)}"
