"""Completion scripts for bash, zsh and fish out of declared commands; they are data, and start no program."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PROGRAM = "diffusion-runtime"
SHELLS = ("bash", "zsh", "fish")
_HEADER = f"# Completion of {PROGRAM}; made by `{PROGRAM} completion SHELL`.\n"
# Stands among values where a path may stand as well.
_PATH_MARK = "@path"


@dataclass(frozen=True)
class CompletedFlag:
    """names: every spelling. takes_value: whether another word follows. values: what it may be; takes_path: or a path;
    takes_list: several, with commas between them."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...] = ()
    takes_path: bool = False
    takes_list: bool = False


@dataclass(frozen=True)
class CompletedCommand:
    """words: the command, `bench attention`, empty for the program. subcommands: name -> help. arguments: what may
    stand without a flag; takes_path: or a path."""

    words: str
    flags: tuple[CompletedFlag, ...]
    subcommands: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    takes_path: bool = False


_BASH = r"""
_diffusion_runtime_paths() {
    local name
    while IFS= read -r name; do COMPREPLY+=("$name"); done < <(compgen -f -- "$1")
    compopt -o filenames 2> /dev/null
}

_diffusion_runtime() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command="" index word prefix="" kind values
    # Bash splits --flag=value at the equals sign.
    if [[ $cur == "=" ]]; then cur=""; elif [[ $prev == "=" ]]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi
    for ((index = 1; index < COMP_CWORD; index++)); do
        word=${COMP_WORDS[index]}
        [[ " $(_diffusion_runtime_words "$command") " == *" $word "* ]] || break
        command="${command:+$command }$word"
    done
    COMPREPLY=()
    IFS=$'\t' read -r kind values <<< "$(_diffusion_runtime_flag "$command" "$prev")"
    if [[ $kind == list && $cur == *,* ]]; then
        prefix=${cur%,*}, cur=${cur##*,}
    elif [[ -z $kind && $cur == -* ]]; then
        values=$(_diffusion_runtime_flags "$command")
    elif [[ -z $kind ]]; then
        values="$(_diffusion_runtime_words "$command") $(_diffusion_runtime_arguments "$command")"
    fi
    if [[ " $values " == *" @path "* ]]; then
        values=${values//@path/}
        _diffusion_runtime_paths "$cur"
    fi
    COMPREPLY+=($(compgen -P "$prefix" -W "$values" -- "$cur"))
    return 0
}
complete -F _diffusion_runtime diffusion-runtime
"""

_ZSH = r"""
_diffusion_runtime() {
    local command="" index word kind values prev=${words[CURRENT-1]}
    for ((index = 2; index < CURRENT; index++)); do
        word=${words[index]}
        [[ " $(_diffusion_runtime_words "$command") " == *" $word "* ]] || break
        command="${command:+$command }$word"
    done
    if compset -P '--*='; then prev=${IPREFIX%=}; fi
    IFS=$'\t' read -r kind values <<< "$(_diffusion_runtime_flag "$command" "$prev")"
    if [[ $kind == list ]]; then
        compset -P '*,'
    elif [[ -z $kind && ${words[CURRENT]} == -* ]]; then
        values=$(_diffusion_runtime_flags "$command")
    elif [[ -z $kind ]]; then
        values="$(_diffusion_runtime_words "$command") $(_diffusion_runtime_arguments "$command")"
    fi
    if [[ " $values " == *" @path "* ]]; then
        values=${values//@path/}
        _files
    fi
    compadd -- ${=values}
}
# A file of $fpath is called as the function that it is named for; sourced, it registers one.
if [[ $funcstack[1] == _diffusion-runtime ]]; then
    _diffusion_runtime "$@"
else
    compdef _diffusion_runtime diffusion-runtime
fi
"""

# The command that is typed: its first word, and the second where the first is a group.
_FISH = """function __diffusion_runtime_at
    set -l words (commandline -opc)[2..]
    set -l command $words[1]
    if contains -- "$command" {groups}; and set -q words[2]; and not string match -q -- '-*' $words[2]
        set command "$command $words[2]"
    end
    test "$command" = "$argv"
end
complete -c {program} -e
complete -c {program} -f
"""


def script(shell: str, commands: Sequence[CompletedCommand]) -> str:
    """shell: one of SHELLS."""
    if shell == "fish":
        return _HEADER + _fish(commands)
    if shell == "bash":
        return _HEADER + _tables(commands) + _BASH
    return f"#compdef {PROGRAM}\n" + _HEADER + _tables(commands) + _ZSH


def _tables(commands: Sequence[CompletedCommand]) -> str:
    """Functions that print what is declared, in words of bash and zsh alike. $1: the words of a command; $2: a flag."""
    tables = {
        "words": {each.words: " ".join(each.subcommands) for each in commands},
        "flags": {each.words: " ".join(name for flag in each.flags for name in flag.names) for each in commands},
        "arguments": {each.words: _listed(each.arguments, each.takes_path) for each in commands},
    }
    lines = []
    for name, table in tables.items():
        lines += [f"_diffusion_runtime_{name}() {{", '    case "$1" in']
        lines += [f"        {shlex.quote(key)}) echo {shlex.quote(text)} ;;" for key, text in table.items() if text]
        lines += ["    esac", "}"]
    # A line per different value: most commands share their flags.
    rows: dict[str, list[str]] = {}
    for command in commands:
        for flag in (flag for flag in command.flags if flag.takes_value):
            rows.setdefault(_kind(flag), []).extend(shlex.quote(f"{command.words} {name}") for name in flag.names)
    lines += ["_diffusion_runtime_flag() {", '    case "$1 $2" in']
    lines += [f"        {'|'.join(names)}) printf '%s\\n' {shlex.quote(kind)} ;;" for kind, names in rows.items()]
    lines += ["    esac", "}"]
    return "\n".join(lines) + "\n"


def _kind(flag: CompletedFlag) -> str:
    """Return the kind of a flag's value, a tabulator, and the values; never empty, as a word that is no flag is."""
    kind = "list" if flag.takes_list else "values" if flag.values or flag.takes_path else "any"
    return f"{kind}\t{_listed(flag.values, flag.takes_path)}"


def _listed(values: Sequence[str], takes_path: bool) -> str:
    return " ".join([*values, *([_PATH_MARK] if takes_path else [])])


def _fish(commands: Sequence[CompletedCommand]) -> str:
    groups = " ".join(shlex.quote(each.words) for each in commands if each.words and each.subcommands)
    lines = []
    for command in commands:
        at = f"complete -c {PROGRAM} -n {_fish_text(f'__diffusion_runtime_at {command.words}')}"
        lines += [f"{at} -a {_fish_text(name)} -d {_fish_text(text)}" for name, text in command.subcommands.items()]
        lines += [f"{at} -a {_fish_text(' '.join(command.arguments))}"] if command.arguments else []
        lines += [f"{at} -F"] if command.takes_path else []
        for flag in command.flags:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            value = (" -r -F" if flag.takes_path else " -x") if flag.takes_value else ""
            value += f" -a {_fish_text(' '.join(flag.values))}" if flag.values else ""
            lines.append(f"{at} {names}{value} -d {_fish_text(flag.help)}")
    return _FISH.format(groups=groups, program=PROGRAM) + "\n".join(lines) + "\n"


def _fish_text(text: str) -> str:
    """Within single quotes fish knows two escapes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
