"""The memory of CPU ranks over a long run, and what huge pages change, from JSON files."""

from docs.measured import measured_on, report_of, table_of


def growth_table() -> str:
    """Return the memory of CPU ranks over the steps of a long run."""
    report = report_of("growth")
    rows = [
        [
            f"{each['step']:,}",
            *(f"{own / (1 << 20):.1f}" for own in each["own_bytes"]),
            f"{each['over_first']:.4f}",
            f"{max(each['mapped_bytes']) / (1 << 20):.1f}",
        ]
        for each in report["results"]
    ]
    ranks = [f"rank {rank}, MiB" for rank in range(report["world_size"])]
    about = (
        f"{report['model']}, {report['global_batch_size']} samples of {report['seq_len']} tokens "
        f"per step, over gloo, {measured_on(report)}; medians of {report['window']} steps."
    )
    return table_of(["step", *ranks, "larger / first", "mapped files, MiB"], rows, about)


def huge_pages_line() -> str:
    """Return a sentence that compares runs in huge pages with those in small ones."""
    report = report_of("huge-pages")
    found = {each["model"]: each for each in report["results"]}
    large, small = found["gpt2"], found["llama"]
    return (
        f"With a vocabulary of 50,000 tokens, a step takes {large['time_over_defaults']:.2f} times "
        f"as long as in small pages, and a rank has {large['memory_over_defaults']:.2f} "
        f"times as much memory; with a small vocabulary, {small['time_over_defaults']:.2f} and "
        f"{small['memory_over_defaults']:.2f} times (medians of {report['rounds']} alternating "
        f"runs, {measured_on(report)})."
    )
