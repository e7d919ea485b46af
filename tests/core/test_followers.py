"""Who follows rows."""

from __future__ import annotations

from kvass.core.rows.listeners import Listener
from tests.core.rows import Rows


def test_every_follower_hears_of_rows() -> None:
    followers = Rows().followers
    told = vars(followers.listeners).values()
    listening = {id(hook.__self__) for hooks in told for hook in hooks}
    for name, one in vars(followers).items():
        assert not isinstance(one, Listener) or id(one) in listening, name
