"""Executes snippets, each in a process of its own: python fresh.py FOLDER…

Reads a JSON string per line, a snippet, and answers with a line: what is wrong with it, or null.
Each process is a fork of this one, which has imported torch, but nothing of the book. The folders
are where snippets may import from.
"""

import builtins
import json
import os
import signal
import symtable
import sys
import traceback
import types

import torch  # noqa: F401

SECONDS = 120


def global_names(table: symtable.SymbolTable) -> set[str]:
    """The global names that the code uses, at once or when its functions are called."""
    found = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_global() and symbol.is_referenced()
    }
    return found.union(*map(global_names, table.get_children()))


def problem(text: str) -> str | None:
    module = types.ModuleType("snippet")
    sys.modules["snippet"] = module
    try:
        exec(compile(text, "snippet", "exec"), vars(module))
    except BaseException:
        return traceback.format_exc()
    table = symtable.symtable(text, "snippet", "exec")
    known = vars(module).keys() | vars(builtins).keys()
    known |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
    known |= {"__class__"}  # of super() in a method, which is copied without its class
    unknown = global_names(table) - known
    return f"undefined names: {', '.join(sorted(unknown))}" if unknown else None


def problem_in_a_fork(text: str) -> str | None:
    receiver, sender = os.pipe()
    process = os.fork()
    if process == 0:
        signal.alarm(SECONDS)
        os.dup2(2, 1)
        os.write(sender, json.dumps(problem(text)).encode()[-60000:])
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as file:
        answer = file.read()
    _, status = os.waitpid(process, 0)
    return json.loads(answer) if answer else f"the process ended with status {status}"


def main() -> None:
    sys.path[:1] = sys.argv[1:]
    assert not [name for name in sys.modules if name.split(".")[0] in ("miniddp", "book", "tests")]
    for line in sys.stdin:
        print(json.dumps(problem_in_a_fork(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
