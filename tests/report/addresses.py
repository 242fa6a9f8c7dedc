"""Where the links of a page lead."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote


class Addresses(HTMLParser):
    """Ids of a page, what it links to, the texts in place of pictures, and the level of each heading."""

    def __init__(self, page: str):
        super().__init__()
        self.ids, self.links, self.alts, self.levels = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if tag == "a" else []
        self.alts += [found["alt"]] if tag == "img" else []
        self.levels += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []


def unresolved(path: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    read = Addresses(path.read_text())
    places = {f"#{unquote(name)}" for name in read.ids}
    inside = [link for link in read.links if link.startswith("#") and unquote(link.split("?")[0]) not in places]
    near = [link.split("#")[0] for link in read.links if not link.startswith(("#", "https://arxiv.org/abs/"))]
    return inside + [link for link in near if not (path.parent / unquote(link)).is_file()]
