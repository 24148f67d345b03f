"""Values of metrics in a text that Prometheus would scrape."""

from collections.abc import Mapping


def sum_of_samples(metrics: str, name: str, labels: Mapping[str, str]) -> float:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    total = 0.0
    for line in metrics.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.partition("{")[0] == name and all(label in sample for label in wanted):
            total += float(value)
    return total
