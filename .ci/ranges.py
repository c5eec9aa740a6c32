"""Are the newest versions that our ranges allow the ones that are installed, and so tested?

    python .ci/ranges.py EXTRA... [-- OPTION...]

The options are uv's, such as `--find-links FOLDER`. Fails where a direct dependency is outside its
range, or older than what could be installed together with all others. Says what holds the others
back, and which releases lie beyond our ranges, so that a maintainer can widen them; neither fails.
Where no package index can be reached, only the installed versions are held against the ranges.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


class NoIndexError(Exception):
    """The package index did not answer."""


class NoSolutionError(Exception):
    """Our ranges contradict each other."""


def direct(extras: Iterable[str]) -> dict[str, Requirement]:
    """Our own requirements by name, those of the extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    found = map(Requirement, lines)
    return {canonicalize_name(r.name): r for r in found if not r.marker or r.marker.evaluate()}


def newest(lines: Iterable[str], options: list[str]) -> dict[str, Version]:
    """What uv would install now for these requirements, by name.

    Raises:
        NoIndexError: The index cannot be reached.
        NoSolutionError: There are no such versions.
    """
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate",
               "--python", sys.executable, *options, "-"]  # fmt: skip
    try:
        done = subprocess.run(
            command, input="\n".join(lines), capture_output=True, text=True, cwd=ROOT, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoIndexError(str(error)) from None
    if done.returncode:
        told = " ".join(done.stderr.split())
        # Without an index uv finds no solution either, and says in a hint that it could not look.
        blind = any(hint in told for hint in ("network was disabled", "could not be queried"))
        if "No solution found" in told and not blind:
            raise NoSolutionError(told)
        raise NoIndexError(told)
    pins = [Requirement(line) for line in done.stdout.splitlines() if "==" in line]
    return {canonicalize_name(p.name): Version(str(p.specifier)[2:]) for p in pins}


def holders(name: str, version: Version, wanted: dict[str, Requirement]) -> list[str]:
    """Installed packages that do not allow a version, with what they ask for."""
    found = set()
    for package in metadata.distributions():
        own = canonicalize_name(package.metadata["Name"])
        extras = {"", *(wanted[own].extras if own in wanted else ())}
        for line in package.requires or ():
            asked = Requirement(line)
            if canonicalize_name(asked.name) != name or asked.specifier.contains(version):
                continue
            if asked.marker is None or any(asked.marker.evaluate({"extra": e}) for e in extras):
                found.add(f"{own} {package.version} ({asked.specifier})")
    return sorted(found)


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    extras, options = arguments[:cut], arguments[cut + 1 :]
    wanted = direct(extras)
    faults = []
    installed = {}
    for name, requirement in wanted.items():
        try:
            installed[name] = Version(metadata.version(name))
        except metadata.PackageNotFoundError:
            faults.append(f"{name} is not installed")
            continue
        if not requirement.specifier.contains(installed[name], prereleases=True):
            faults.append(f"{name} {installed[name]} is installed, outside {requirement.specifier}")
    lines = [str(requirement) for requirement in wanted.values()]
    held = beyond = 0
    try:
        together = newest(lines, options)
        alone = newest(lines, [*options, "--no-deps"])
        latest = newest(wanted, [*options, "--no-deps"])
    except NoIndexError as error:
        print(f"no package index ({error}): not compared with the newest versions")
        together = alone = latest = {}
    except NoSolutionError as error:
        faults.append(str(error))
        together = alone = latest = {}
    for name, have in installed.items():
        if name not in together:
            continue
        public = Version(have.public)
        if public < Version(together[name].public):
            faults.append(f"{name} {have} is installed, {together[name]} could be")
        if Version(together[name].public) < Version(alone[name].public):
            held += 1
            blamed = ", ".join(holders(name, alone[name], wanted)) or "the others together"
            print(f"held back: {name} {together[name]}, not {alone[name]}, by {blamed}")
        if not wanted[name].specifier.contains(latest[name]):
            beyond += 1
            print(f"beyond our range: {name} {latest[name]}; we say {wanted[name].specifier}")
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    if faults:
        print("`make clean install` installs the newest versions", file=sys.stderr)
    counts = f"{held} held back by others, {beyond} with releases beyond our ranges"
    print(f"{len(wanted)} direct dependencies; {counts if together else 'ranges kept'}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
