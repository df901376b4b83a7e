"""Extracts the part of each published schema that the examples use.

    python -m venv published && published/bin/pip install pyyaml pydantic dstack \
        kubeflow-trainer-api kubernetes-validate skypilot
    published/bin/python -m tests.examples.extract

It writes schemas/*.json: names, types, enumerations and limits of each level, closed against other
names. It fails if an example uses a name that the package does not know.
"""

import json
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]
HERE = Path(__file__).parent
SCHEMAS, EXAMPLES = HERE / "schemas", HERE.parent.parent / "examples"
_KEPT = ("type", "enum", "const", "pattern", "minimum", "maximum", "uniqueItems")
# Kubernetes lists the allowed values of some names only in their descriptions.
_LISTED, _WORD = re.compile(r"Possible (?:enum )?values are"), re.compile(r"- [`\"]*(\w+)[`\"]*:")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
    "boolean": bool, "null": type(None),
}  # fmt: skip


class UnknownNameError(Exception):
    """An example uses a name or a type that the published schema does not have."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where


def documents(example: str) -> list[Any]:
    """The documents of an example."""
    return list(yaml.safe_load_all((EXAMPLES / example).read_text()))


def reduced(schema: Schema, values: list[Any], resolve: Callable[[str], Schema]) -> Schema:
    """The part of a schema that `values` use, which are all at the same place.

    Raises:
        UnknownNameError: If they use a name or a type that it does not have.
    """
    return _Reduction(resolve).of(schema, values, "")


class _Reduction:
    def __init__(self, resolve: Callable[[str], Schema]) -> None:
        self._resolve = resolve

    def of(self, schema: Schema, values: list[Any], where: str) -> Schema:
        while "$ref" in schema:
            is_quantity = schema["$ref"].endswith("Quantity")
            schema = self._resolve(schema["$ref"])
            if is_quantity and schema.get("type") == "object":  # of a generated class
                schema = {"type": ["string", "number"]}
        variants = schema.get("anyOf") or schema.get("oneOf")
        if variants is not None:
            return self._variant(variants, values, where)
        if not all(_has_type(value, schema) for value in values):
            raise UnknownNameError(where, f"expected {schema.get('type')}, got {values}")
        found = {key: schema[key] for key in _KEPT if key in schema}
        if isinstance(found.get("type"), list):
            found["type"] = [each for each in found["type"] if each != "null"]
        about = schema.get("description", "")
        if listed := _LISTED.search(about):
            found["enum"] = _WORD.findall(about, listed.end())
        if all(isinstance(value, dict) for value in values):
            found |= self._object(schema, values, where)
        elif all(isinstance(value, list) for value in values) and "items" in schema:
            items = [item for value in values for item in value]
            found["items"] = self.of(schema["items"], items, f"{where}[]")
        return found

    def _variant(self, variants: list[Schema], values: list[Any], where: str) -> Schema:
        """The first variant that knows the values."""
        problems: list[UnknownNameError] = []
        for each in variants:
            try:
                return self.of(each, values, where)
            except UnknownNameError as error:
                problems.append(error)
        raise max(problems, key=lambda error: len(error.where))

    def _object(self, schema: Schema, values: list[Any], where: str) -> Schema:
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        found: Schema = {"properties": {}, "additionalProperties": False}
        for name in dict.fromkeys(name for value in values for name in value):
            there = [value[name] for value in values if name in value]
            if name in known:
                found["properties"][name] = self.of(known[name], there, f"{where}.{name}")
            elif isinstance(others, dict):
                found["additionalProperties"] = self.of(others, there, f"{where}.{name}")
            else:
                raise UnknownNameError(f"{where}.{name}", "not in the published schema")
        if required := schema.get("required"):
            found["required"] = required
        return found


def _has_type(value: object, schema: Schema) -> bool:
    names = schema.get("type", [])
    types = tuple(_TYPES[name] for name in ([names] if isinstance(names, str) else names))
    fits = not types or any(
        isinstance(value, each) and not (isinstance(value, bool) and each is int) for each in types
    )
    return fits and ("enum" not in schema or value in schema["enum"])


# ---- the packages ------------------------------------------------------------------------


def _in(definitions: Schema) -> Callable[[str], Schema]:
    return lambda reference: definitions[reference.rpartition("/")[2]]


def _of_model(model: Any, values: list[Any]) -> Schema:
    """The part of a pydantic model's schema."""
    whole = model.model_json_schema(by_alias=True)
    return reduced(whole, values, _in(whole.get("$defs", {})))


def _kubernetes() -> Iterator[tuple[str, str, Schema]]:
    import kubernetes_validate

    package, number = "kubernetes-validate", version("kubernetes-validate")
    folders = Path(str(kubernetes_validate.__file__)).parent / "kubernetes-json-schema"
    file = folders / f"v{number}-local-strict" / "_definitions.json"
    definitions = json.loads(file.read_text())["$defs"]
    kinds = {"Service": "io.k8s.api.core.v1.Service", "Job": "io.k8s.api.batch.v1.Job"}
    for each in documents("kubernetes/job.yaml"):
        kind = each["kind"]
        yield package, kind, reduced(definitions[kinds[kind]], [each], _in(definitions))


def _kubeflow() -> Iterator[tuple[str, str, Schema]]:
    from kubeflow_trainer_api import models

    package = "kubeflow-trainer-api"
    for each in documents("kubeflow/trainjob.yaml"):
        model = getattr(models, f"TrainerV1alpha1{each['kind']}")
        yield package, each["kind"], _of_model(model, [each])
    posted = {
        "progressPercentage": 1, "estimatedRemainingSeconds": 1, "lastUpdatedTime": "",
        "metrics": [{"name": "", "value": ""}],
    }  # fmt: skip
    model = models.TrainerV1alpha1UpdateTrainJobStatusRequest
    yield package, "UpdateTrainJobStatusRequest", _of_model(model, [{"trainerStatus": posted}])


def _skypilot() -> Iterator[tuple[str, str, Schema]]:
    from sky.utils import schemas

    (example,) = documents("skypilot/train.yaml")
    task = schemas.get_task_schema()
    # The task's own schema leaves these to others.
    task["properties"]["resources"] = schemas.get_resources_schema()
    task["properties"]["volumes"] = {"type": "object", "additionalProperties": {"type": "string"}}
    yield "skypilot", "task", reduced(task, [example], _in({}))


def _dstack() -> Iterator[tuple[str, str, Schema]]:
    from dstack._internal.core.models.configurations import TaskConfiguration

    (example,) = documents("dstack/train.dstack.yml")
    yield "dstack", "task", _of_model(TaskConfiguration, [example])


def main() -> None:
    """Write all schemas."""
    SCHEMAS.mkdir(exist_ok=True)
    for of_package in (_kubernetes, _kubeflow, _skypilot, _dstack):
        for package, kind, schema in of_package():
            where = {"$comment": f"{kind} of {package} {version(package)}, in part"}
            text = json.dumps(where | schema, indent=1)
            (SCHEMAS / f"{package}-{kind}.json".lower()).write_text(f"{text}\n")


if __name__ == "__main__":
    main()
