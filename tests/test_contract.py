import subquad as sq
from tests.contract import MethodContract


class TestEveryMethod(MethodContract):
    methods = [sq.from_dict({"name": name, **sq.METHODS[name].traits.example}) for name in sq.list_methods()]  # noqa: RUF012
