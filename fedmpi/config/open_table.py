"""The tables in which options of chosen parts stand, the user's own that bear a key's name apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, PrivateAttr, model_serializer, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from fedmpi.config.base import Table, Values
from fedmpi.config.own_options import chosen_by, is_own, may_be_own


class OpenTable(Table):
    """Base of the tables in which the options of chosen parts stand: keys that are not declared are theirs.

    So is a declared key that means nothing to fedmpi with the parts chosen and is an option of the user's own
    (`own_options.is_own`). What is given for it is kept apart as it was given, and the field itself keeps its default.
    """

    model_config = ConfigDict(extra="allow")

    in_config: ClassVar[str]
    """The table's name in the configuration."""

    _own_options: Values = PrivateAttr(default_factory=dict)

    @property
    def own_options(self) -> Values:
        """What was given to options of the user's own parts that bear the name of a declared key."""
        return self._own_options

    @model_validator(mode="wrap")
    @classmethod
    def _keep_apart(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        own = cls._own_among(given) if isinstance(given, Mapping) else set[str]()
        if not own:
            return validate(given)
        table = validate({key: value for key, value in given.items() if key not in own})
        table._own_options = {key: given[key] for key in given if key in own}
        return table

    @classmethod
    def _own_among(cls, given: Mapping[str, Any]) -> set[str]:
        unsettled = [key for key in given if may_be_own(cls.in_config, key, cls)]
        if not unsettled:
            return set()
        values = {f"{cls.in_config}.{key}": value for key, value in given.items()}
        selected = list(chosen_by(values, cls.in_config, cls))
        return {key for key in unsettled if is_own(cls.in_config, key, cls, selected)}

    @model_serializer(mode="wrap")
    def _with_own_options(self, serialize: SerializerFunctionWrapHandler) -> Values:
        return {**serialize(self), **self._own_options}

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield from super().__repr_args__()
        if self._own_options:
            yield "own_options", self._own_options
