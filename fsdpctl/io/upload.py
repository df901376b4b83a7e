"""The upload of an export to a private repository of the Hugging Face Hub, in one commit."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.errors import UsageError, first_of, nearest
from fsdpctl.io.activity import doing
from fsdpctl.io.fetch import Repository, host_of_hub, is_offline
from fsdpctl.io.hub_answers import PATIENCE, checked_answers

HUB = "hf://"
_NAME = re.compile(r"hf://([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)")
_OF_THE_HUB = {".gitattributes"}  # of a repository without a commit


@dataclass(frozen=True, slots=True)
class UploadTarget:
    """A repository that exists or is created, which `check` has found to be writable."""

    url: str  # hf://ORG/NAME
    overwrite: bool

    @property
    def name(self) -> str:
        return self._repository.name

    @property
    def _repository(self) -> Repository:
        if (match := _NAME.fullmatch(self.url)) is None:
            raise UsageError(f"{self.url}: expected hf://ORG/NAME")
        return Repository(f"{match[1]}/{match[2]}", None, "model", self.url, is_target=True)

    def check(self) -> None:
        """Check the token, and that nothing in the repository is overwritten unintentionally."""
        from huggingface_hub import HfApi, constants, get_token

        owner, where = self.name.partition("/")[0], self.url
        if is_offline():
            raise UsageError(f"{where}: HF_HUB_OFFLINE is set; unset it to upload")
        if get_token() is None:
            raise UsageError(f"{where}: no token; set HF_TOKEN, or run `hf auth login`")
        with (
            self._repository.explained(),
            checked_answers(constants.ENDPOINT),
            doing(f"asking {host_of_hub()} for {self.name}"),
        ):
            user: dict[str, Any] = HfApi().whoami()
            mine = [user.get("name"), *(each.get("name") for each in user.get("orgs", ()))]
            owners = [str(each) for each in mine if each]
            if owner not in owners:
                raise UsageError(
                    f"{where}: the token is of {first_of(owners)}, not of {owner}"
                    f"{nearest(owner, owners)}"
                )
            role = user.get("auth", {}).get("accessToken", {}).get("role")
            if role == "read":
                raise UsageError(f"{where}: the token may only read; create one that may write")
            self._existing()

    def _existing(self) -> tuple[str | None, list[str]]:
        """Return the commit and the files of the repository, None if it does not exist."""
        from huggingface_hub import HfApi, errors

        try:
            info: Any = HfApi().repo_info(self.name)
        except errors.GatedRepoError:
            raise
        except errors.RepositoryNotFoundError:
            return None, []
        if not info.private:
            raise UsageError(
                f"{self.url}: is public, and fsdpctl uploads to private repositories only; pass "
                "another name, or export to a directory and run `hf upload`"
            )
        names = [each.rfilename for each in info.siblings or ()]
        if {*names} - _OF_THE_HUB and not self.overwrite:
            raise UsageError(f"{self.url}: already exists; pass --overwrite to replace its files")
        return info.sha, names

    def upload(self, folder: Path) -> str:
        """Upload the files below `folder` in one commit; return the address of the repository."""
        from huggingface_hub import (
            CommitOperationAdd,
            CommitOperationDelete,
            HfApi,
            constants,
        )
        from huggingface_hub.utils.tqdm import disable_progress_bars

        files = sorted(each for each in folder.rglob("*") if each.is_file())
        new = {str(each.relative_to(folder)): each for each in files}
        disable_progress_bars()
        with (
            self._repository.explained(),
            checked_answers(constants.ENDPOINT, PATIENCE),
            doing(f"uploading {self.name}"),
        ):
            if self._existing()[0] is None:
                HfApi().create_repo(self.name, private=True, exist_ok=True)
            parent, names = self._existing()
            operations: list[Any] = [CommitOperationAdd(a, b) for a, b in new.items()]
            old = sorted({*names} - {*new} - _OF_THE_HUB)
            operations += [CommitOperationDelete(each) for each in old]
            HfApi().create_commit(
                self.name, operations, commit_message="Upload by fsdpctl", parent_commit=parent
            )
        return f"{constants.ENDPOINT}/{self.name}"
