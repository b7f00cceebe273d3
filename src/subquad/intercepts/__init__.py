"""A method in place of `scaled_dot_product_attention`, wherever it is called from."""

from subquad.intercepts.intercept import intercept
from subquad.intercepts.mode import SdpaCalls
from subquad.intercepts.seen import Calls, Seen

__all__ = ["Calls", "SdpaCalls", "Seen", "intercept"]
