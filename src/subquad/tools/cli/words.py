"""The check of the words that a command is given, before it reads them: empty ones and `--resume` are refused."""

from typing import Any

from typer.core import TyperCommand

from subquad.tools.cli import torchrun
from subquad.tools.cli.common import user_errors


class StrictCommand(TyperCommand):
    """A command that refuses empty words: `Path("")` is the current folder, so later nothing could tell."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line; those that are empty end the command in one line.

        A variable of the shell that is not set makes an empty word: `--text "$TEXT"`.
        """
        if not ctx.resilient_parsing:  # not a shell that completes a command
            parameters = self.get_params(ctx)
            with user_errors(), torchrun.one_reports():
                try:
                    values, *_ = self.make_parser(ctx).parse_args(args=list(args))
                except Exception as error:
                    _refuse_resume(error, parameters)
                    raise
                for parameter in parameters:
                    _refuse_empty(parameter, values.get(parameter.name))
        return super().parse_args(ctx, args)


def _refuse_resume(error: Exception, parameters: list[Any]) -> None:
    """InputError for an option that many programs have, which would be taken for a slip of the keyboard.

    `error`: click's for an unknown option, which has its name. Versions of typer import its class from elsewhere.
    """
    from subquad.core.errors import InputError

    is_resume = getattr(error, "option_name", None) == "--resume"
    if is_resume and any("--out" in parameter.opts for parameter in parameters):
        raise InputError("no option --resume; the same command without it resumes an interrupted run") from None


def _refuse_empty(parameter: Any, value: Any) -> None:
    from subquad.core.errors import InputError

    words = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(word, str) and not word.strip() for word in words):
        is_option = parameter.param_type_name == "option"
        name = max(parameter.opts, key=len) if is_option else parameter.name.upper()
        raise InputError(
            f"{name} is empty, as a variable of the shell that is not set makes it; give a value or leave it out"
        )
