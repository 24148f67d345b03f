"""Moving averages of what is measured again and again: rates of the disk, of prefill."""


def smoothed(average: float, sample: float) -> float:
    """Return the average with one more sample: it has 30 %, and nearly all of the last ten together.

    One odd sample is damped, and a machine that has changed is believed within a few.
    """
    return average + 0.3 * (sample - average)
