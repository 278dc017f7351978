"""pass@k: how likely it is that one of k answers to a problem is right.

Chen et al., Evaluating Large Language Models Trained on Code (arXiv:2107.03374), equation 1: of n samples c are right,
and 1 - C(n - c, k) / C(n, k) is the unbiased estimate. The plug-in 1 - (1 - c / n)^k is biased (their appendix A).
"""

from __future__ import annotations


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The estimate for one problem. samples: how many answers there are, `right` of them right, 1 <= k <= samples.

    As the product of 1 - k / i over i from n - c + 1 to n, so that no number is larger than 1. Raises ValueError.
    """
    if not 0 <= right <= samples:
        raise ValueError(f"{right} of {samples} answers cannot be right")
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs {k} answers to a problem at least, and at least 1; there are {samples}")
    if samples - right < k:
        return 1.0
    none = 1.0
    for count in range(samples - right + 1, samples + 1):
        none *= 1.0 - k / count
    return 1.0 - none
