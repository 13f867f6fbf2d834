"""Shows the generated constructor of an Equinox module on its API page."""

import griffe


class Constructors(griffe.Extension):
    def on_class_members(self, *, cls: griffe.Class, **_) -> None:
        # Neither properties nor class variables carry this label.
        fields = [f for f in cls.attributes.values() if "instance-attribute" in f.labels]
        if fields and "__init__" not in cls.members:
            kind = griffe.ParameterKind.positional_or_keyword
            parameters = [griffe.Parameter("self", kind=kind)] + [
                griffe.Parameter(f.name, annotation=f.annotation, kind=kind, default=f.value)
                for f in fields
            ]
            init = griffe.Function("__init__", parameters=griffe.Parameters(*parameters))
            cls.set_member("__init__", init)
