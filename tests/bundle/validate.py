"""Run by test_crate in an environment that holds roc-validator: `python validate.py CRATE CONTEXT CACHE`.

Validates a folder offline against the profile of workflow runs, at the level of what is required. CONTEXT is a copy of
the JSON-LD context of RO-Crate 1.1, which the validator then finds in its cache. Exit code 1 where something is wrong.
"""

import sys
from io import BytesIO
from pathlib import Path

import requests
from requests.adapters import BaseAdapter
from requests_cache import CachedSession
from rocrate_validator import services
from rocrate_validator.models import Severity, ValidationSettings
from urllib3 import HTTPResponse

CONTEXT_URL = "https://w3id.org/ro/crate/1.1/context"


class OneFile(BaseAdapter):
    """Answers every request with one file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def send(self, request, **options):
        answer = requests.Response()
        answer.status_code, answer.url, answer.request = 200, request.url, request
        answer.headers["Content-Type"] = "application/ld+json"
        answer.raw = HTTPResponse(BytesIO(Path(self.path).read_bytes()), status=200, preload_content=False)
        return answer

    def close(self) -> None:
        pass


def main(crate: str, context: str, cache: str) -> int:
    session = CachedSession(cache_name=cache, backend="sqlite", expire_after=-1)
    session.mount("https://", OneFile(context))
    session.get(CONTEXT_URL, headers={"Accept": "application/ld+json, application/json, */*;q=0.1"})
    settings = ValidationSettings(
        rocrate_uri=crate,
        profile_identifier="workflow-run-crate-0.5",
        requirement_severity=Severity.REQUIRED,
        cache_path=cache,
        offline=True,
    )
    found = services.validate(settings)
    for issue in found.get_issues():
        print(f"{issue.check.identifier}: {issue.message}")
    return int(found.has_issues())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
