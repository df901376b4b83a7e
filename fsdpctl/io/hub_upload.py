"""Uploads an export to a private repository of the Hugging Face Hub, in one commit."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.errors import UsageError, did_you_mean, shorten_list
from fsdpctl.io.activity import doing
from fsdpctl.io.hub_repository import Repository, hub_host, is_offline
from fsdpctl.io.hub_responses import MAX_SILENCE_S, checked_responses

_NAME = re.compile(r"hf://([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)")
_INITIAL_FILES = {".gitattributes"}  # files of a new repository


@dataclass(frozen=True, slots=True)
class UploadTarget:
    """A repository on the Hub, which the upload creates if it does not exist."""

    url: str  # hf://ORG/NAME
    overwrite: bool

    @property
    def name(self) -> str:
        if (match := _NAME.fullmatch(self.url)) is None:
            raise UsageError(f"{self.url}: expected a directory or hf://ORG/NAME")
        return match[1]

    @contextmanager
    def _hub_api(self, action: str) -> Iterator[Any]:
        from huggingface_hub import HfApi, constants

        repository = Repository(self.name, None, "model", self.url, is_upload=True)
        responses = checked_responses(constants.ENDPOINT, MAX_SILENCE_S)
        with repository.hub_errors(), responses, doing(action):
            yield HfApi()

    def check(self) -> None:
        """Check the token and its owner, and that the repository is private and may be written."""
        from huggingface_hub import get_token

        owner = self.name.partition("/")[0]
        if is_offline():
            raise UsageError(f"{self.url}: HF_HUB_OFFLINE is set; unset it to upload")
        if get_token() is None:
            raise UsageError(f"{self.url}: no token; set HF_TOKEN, or run `hf auth login`")
        with self._hub_api(f"asking {hub_host()} for {self.name}") as api:
            user = api.whoami()
            owners = [str(x["name"]) for x in (user, *user.get("orgs", ())) if x.get("name")]
            if owner not in owners:
                problem = f"the token is of {shorten_list(owners)}, not of {owner}"
                raise UsageError(f"{self.url}: {problem}{did_you_mean(owner, owners)}")
            if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
                raise UsageError(f"{self.url}: the token may only read; create one that may write")
            self._commit_and_files(api)

    def _commit_and_files(self, api: Any) -> tuple[str | None, set[str]]:
        """Return the commit (None: the repository does not exist) and the names of the files."""
        from huggingface_hub import errors

        try:
            info = api.repo_info(self.name)
        except errors.RepositoryNotFoundError:
            return None, set()
        if not info.private:
            raise UsageError(
                f"{self.url}: public; fsdpctl uploads to private repositories only; pass another "
                "name, or export to a directory and run `hf upload`"
            )
        names = {each.rfilename for each in info.siblings or ()} - _INITIAL_FILES
        if names and not self.overwrite:
            raise UsageError(f"{self.url}: already exists; pass --overwrite to replace its files")
        return info.sha, names

    def upload(self, folder: Path) -> str:
        """Upload the files below `folder` in one commit; return the address of the repository."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants
        from huggingface_hub.utils.tqdm import disable_progress_bars

        new = {str(x.relative_to(folder)): x for x in sorted(folder.rglob("*")) if x.is_file()}
        disable_progress_bars()
        with self._hub_api(f"uploading {self.name}") as api:
            if self._commit_and_files(api)[0] is None:
                api.create_repo(self.name, private=True, exist_ok=True)
            parent, names = self._commit_and_files(api)  # a new repository has a first commit
            changes = [CommitOperationAdd(name, path) for name, path in new.items()]
            removed = [CommitOperationDelete(name) for name in sorted(names - new.keys())]
            commit = {"commit_message": "Upload by fsdpctl", "parent_commit": parent}
            api.create_commit(self.name, [*changes, *removed], **commit)
        return f"{constants.ENDPOINT}/{self.name}"
