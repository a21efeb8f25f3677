"""How many examples a property test tries."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

NUM_QUICK, NUM_ALL = 20, 200
"""In the quick tier and in the parts."""

FOLDER = HealthCheck.function_scoped_fixture
"""Examples of a test may share its temporary folder."""


def choose_number(*, quick: bool) -> None:
    """Set the number of examples of all tests that are imported later.

    Each run tries the same examples, so that only a change of the code can make a test fail. There
    is no deadline, because the time of an example depends on the other programs of the machine.
    """
    settings.register_profile(
        "tests",
        max_examples=NUM_QUICK if quick else NUM_ALL,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, FOLDER],
    )
    settings.load_profile("tests")


def fewer() -> settings:
    """Return the settings of a test whose examples take long: a fifth as many examples."""
    return settings(max_examples=settings().max_examples // 5)
