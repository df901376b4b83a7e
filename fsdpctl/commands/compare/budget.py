"""The training that `--budget` buys with each variant."""

from collections.abc import Iterator, Sequence

from fsdpctl.commands.compare.report import OK, VariantResult
from fsdpctl.io.texts import three_digits

_HOUR = 3600


def add_budget(results: Sequence[VariantResult], budget: float) -> None:
    """Add the steps and tokens that `budget` buys to each variant that fits and has a price."""
    for result in results:
        if result.status == OK and result.price and result.step_seconds and result.world_size:
            step_cost = result.price * result.world_size * result.step_seconds / _HOUR
            result.budget_steps = int(budget / step_cost)
            tokens = (result.tokens_per_second or 0.0) * result.step_seconds
            result.budget_tokens = round(result.budget_steps * tokens)


def budget_lines(results: Sequence[VariantResult], budget: float) -> Iterator[str]:
    """Yield the cheapest variant that ends within `budget`, then what `budget` buys.

    Each other variant that fits has a line, that with the most tokens first.
    """
    money, fitting = f"{budget:,g}", [result for result in results if result.status == OK]
    ending = [result for result in fitting if result.cost is not None and result.cost <= budget]
    best = min(ending, key=lambda result: result.cost or 0.0, default=None)
    if best is not None:
        text = f"the cheapest that fits and is predicted to end within {money}"
        yield f"budget  {best.label}: {text}, {_cost(best)}"
    elif any(result.cost is not None for result in fitting):
        yield f"budget  no variant that fits is predicted to end within {money}"
    bought = [x for x in fitting if x.budget_tokens is not None and x is not best]
    for result in sorted(bought, key=lambda result: -(result.budget_tokens or 0)):
        hours = three_digits((result.budget_steps or 0) * (result.step_seconds or 0.0) / _HOUR)
        tokens = f"{(result.budget_tokens or 0) / 1e9:.3g} B tokens"
        yield (
            f"{money} buys  {result.label}: {tokens}, {result.budget_steps:,} steps in {hours} "
            f"hours{_against_cost(result, budget)}"
        )
    for result in fitting:
        if result.price is None:
            yield f"price   {result.label}: unknown; set cluster.price"


def _cost(result: VariantResult) -> str:
    assert result.cost is not None
    text, band = f"cost {three_digits(result.cost)}", result.error_band
    if band is None:
        return text
    low, high = (three_digits(result.cost * each) for each in (band.low, band.high))
    return f"{text} ({low} to {high})"


def _against_cost(result: VariantResult, budget: float) -> str:
    if not result.cost:
        return ""
    share = "enough for the run"
    if result.cost > budget:
        share = f"{budget / result.cost:.0%} of the run"
    return f", {share}: {_cost(result)}"
