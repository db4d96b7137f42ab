"""What is wrong with a shard, or with a member of one."""

from __future__ import annotations


class ShardError(ValueError):
    """A shard, or a member of one, that cannot be used. The message names it and the way out."""


class MemberError(ShardError):
    """A member that cannot be used, in a shard that can."""


class UnreachableError(ShardError):
    """A read that failed for now. It says nothing of the data, so nothing may be concluded from it but to try again."""
