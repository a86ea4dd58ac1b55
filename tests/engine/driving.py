"""A whole drive, as most tests of the driver need it."""

from __future__ import annotations


def drive(driver, prompts, **kwargs):
    """Submit `prompts`, with `kwargs` of `add_requests`, and return the tokens of each completion in their order."""
    driver.add_requests(prompts, **kwargs)
    return [completion.completion_ids for completion in driver.drive_until_empty().values()]
