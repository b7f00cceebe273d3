"""What methods share whose tokens are hashed into buckets of one size."""

from dataclasses import replace

from subquad.masks import Mask
from subquad.methods.base import Method, Traits


def check_bucket_counts(method: Method, buckets: int, bucket_size: int) -> None:
    """Raise ValueError where neither setting says how many buckets there are."""
    if buckets == bucket_size == 0:
        raise ValueError(f"{method.name!r}: buckets=0 takes their number from bucket_size, which is 0 too")


def sized_traits(traits: Traits, bucket_size: int, merge: str) -> Traits:
    """The traits with buckets of a size that does not grow with the length; 0 leaves them as they are."""
    if bucket_size == 0:
        return traits
    return replace(traits, subquadratic=merge == "multiplicity", exact_limit={"buckets": 1, "bucket_size": "M"})


def tied_refusal(method: Method, mask: Mask, cross: bool) -> str | None:
    """Why a method whose causal form ties the hashes of queries and keys takes no others there."""
    if not (mask.is_causal and cross):
        return None
    return (
        f"{method.name!r} ties the hashes of queries and keys under a causal mask, so they must be the same tokens: it "
        "takes no cross-attention and no step on a cache there (generate with use_cache=False)"
    )
