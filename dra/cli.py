"""`hymcache dra`: the parts of the Kubernetes driver, each a process of its own."""

from __future__ import annotations

import importlib
from typing import Any, Final

import typer
from typer.core import TyperGroup

from hymcache.errors import ConfigError

# Command -> module and function. A part's module is imported when its command is run: a host
# agent has no use for the client of Kubernetes, which takes longer to import than all of the rest.
_COMMANDS: Final = {
    "controller": ("hymcache.dra.controller.command", "controller"),
    "host-agent": ("hymcache.dra.host_agent.command", "host_agent"),
    "kubelet-plugin": ("hymcache.dra.kubelet_plugin.command", "kubelet_plugin"),
    "simulate": ("hymcache.dra.simulator.command", "simulate"),
}

# What the extra `kubernetes` installs.
_OF_THE_EXTRA: Final = frozenset({"aiohttp", "httpx", "kubernetes"})


class _DeferredCommands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module_name, function_name = _COMMANDS[cmd_name]
        single = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in _OF_THE_EXTRA:
                raise
            raise ConfigError(
                f"hymcache dra {cmd_name}: {error.name} is not installed; "
                "run: pip install 'hymcache[kubernetes]'"
            ) from error
        single.command(cmd_name)(getattr(module, function_name))
        return typer.main.get_command(single)


app = typer.Typer(
    cls=_DeferredCommands,
    help="Composable CXL memory in Kubernetes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    # The docstring would replace the help text.
    pass
