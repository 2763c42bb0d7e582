"""Models and trainers of other people: `decorate` for models that nobody wants to edit.

`selection` says which modules of a model are its layers, `modules` puts the decorator on these instances and takes it
off again; `attached` and `text` serve the trainers of other libraries (`transformers`, `lightning`). What needs a
package that is not installed with ckptdeco is in a module of its own, imported by who uses it.
"""

from ckptdeco.integrations.attached import Attachment, attach
from ckptdeco.integrations.text import policy_from_text

__all__ = ["Attachment", "attach", "policy_from_text"]
