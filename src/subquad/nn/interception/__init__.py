"""A method in place of `scaled_dot_product_attention`, wherever it is called from."""

from subquad.nn.interception.intercept import intercept
from subquad.nn.interception.log import InterceptedCalls, InterceptionLog
from subquad.nn.interception.mode import SdpaCalls

__all__ = ["InterceptedCalls", "InterceptionLog", "SdpaCalls", "intercept"]
