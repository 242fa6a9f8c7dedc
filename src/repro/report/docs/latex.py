"""Texts of ours for LaTeX: every character that means something there, or that its fonts lack, written as it wants it."""

import unicodedata

_ASCII = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
}
_SIGNS = {
    "×": r"$\times$",
    "÷": r"$\div$",
    "±": r"$\pm$",
    "·": r"$\cdot$",
    "−": "$-$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "≈": r"$\approx$",
    "≠": r"$\ne$",
    "→": r"$\to$",
    "²": "$^2$",
    "³": "$^3$",
    "⁹": "$^9$",
    "†": r"\textdagger{}",
    "µ": r"$\mu$",
    "ψ": r"$\psi$",
    "χ": r"$\chi$",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "’": "'",
    "‘": "`",
    "“": "``",
    "”": "''",
    "\u00a0": "~",
}


class Tex(str):
    """LaTeX already."""


def escape(text: object) -> Tex:
    """A text as LaTeX, which sets it as it stands. ValueError for a character that it has no way to set here."""
    return text if isinstance(text, Tex) else Tex("".join(map(_escaped, str(text))))


def _escaped(character: str) -> str:
    if found := _ASCII.get(character) or _SIGNS.get(character):
        return found
    if character.isascii() or unicodedata.name(character, "").startswith("LATIN"):
        return character
    name, signs = unicodedata.name(character, "no name"), " ".join(filter(str.isprintable, _SIGNS))
    raise ValueError(f"{character!r} ({name}): found it in a text for LaTeX; allowed: ASCII, Latin letters, {signs}")


def code(text: str) -> Tex:
    """Commands and names in typewriter letters, with places to break a line: after `_`, `/` and a space."""
    found = escape(text).replace("-", "{-}")
    for end in (r"\_", "/"):
        found = found.replace(end, end + r"\allowbreak{}")
    return Tex(rf"\texttt{{{found}}}")
