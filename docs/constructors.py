"""Shows the generated constructor of an Equinox module on its API page."""

import griffe


class Constructors(griffe.Extension):
    def on_class_members(self, *, cls: griffe.Class, **_) -> None:
        # Neither properties nor class variables carry this label; aliases of methods do, without a type.
        fields = [f for f in cls.attributes.values() if "instance-attribute" in f.labels and f.annotation]
        if fields and "__init__" not in cls.members:
            kind = griffe.ParameterKind.positional_or_keyword
            parameters = [griffe.Parameter("self", kind=kind)] + [
                griffe.Parameter(f.name, annotation=f.annotation, kind=kind, default=default(f.value)) for f in fields
            ]
            init = griffe.Function("__init__", parameters=griffe.Parameters(*parameters))
            cls.set_member("__init__", init)


def default(value):
    """The default of a field, also where it stands inside `eqx.field(...)` or `number(...)`."""
    if isinstance(value, griffe.ExprCall) and str(value.function) == "number":
        return value.arguments[0]
    if isinstance(value, griffe.ExprCall) and str(value.function) == "eqx.field":
        keywords = {a.name: a.value for a in value.arguments if isinstance(a, griffe.ExprKeyword)}
        return keywords.get("default")
    return value
