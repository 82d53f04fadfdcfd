"""`groupwise check RECIPE`."""

from __future__ import annotations

from dataclasses import asdict

from groupwise.cli.arguments import print_json, quiet_stdout, read_config

DESCRIPTION = (
    "Run the preflight checks of a recipe without training: roll out and score one pass, then check ratios, groups,"
    " gradients and shapes. Nothing is written. Exit code 2 if a check fails."
)


def run(arguments: list[str], as_json: bool) -> int:
    config = read_config("check", arguments, DESCRIPTION)
    from rich.console import Console

    from groupwise.dist.comm import disconnect
    from groupwise.training.progress import check_table
    from groupwise.training.run import check

    with quiet_stdout(as_json):
        checks, is_main = check(config)
    disconnect()
    passed = all(check.passed for check in checks)
    if is_main and as_json:
        print_json({"passed": passed, "checks": [asdict(check) for check in checks]})
    elif is_main:
        Console().print(check_table(checks))
    return 0 if passed else 2
