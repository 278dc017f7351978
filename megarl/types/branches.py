"""What a session server has seen of an agent's client, along one branch of the episode."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Branch:
    """Which of an episode's branches a rollout is, and what its client has made of the history.

    Training reads none of it: a branch is trained by the ids that the engine saw, whatever is said here.
    """

    number: int
    """From 0 on, in the order in which their last answers came."""
    forks: int
    """How often the client has left a history that it had begun, in the whole episode: the same on all its branches."""
    drift: bool
    """Whether its last answer would have been asked for with other ids if all before it had been rendered and tokenised
    afresh."""
