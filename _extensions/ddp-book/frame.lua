-- The frame of quoted code: the file's name above it, and what its copy button puts in front.

local import = ...
local fold = import "fold"
local project = import "project"

-- `said` stands beside the file's name; `fold="…"` folds everything away under these words.
return function(div, path, said, blocks, before)
  local name = project.source_link({ pandoc.Str(path) }, path)
  if said then name:insert(pandoc.Span(said, { class = "code-said" })) end
  blocks:insert(1, pandoc.Div({ pandoc.Plain(name) }, { class = "code-file" }))
  if div.attributes.fold then blocks = fold(blocks, div.attributes.fold, "folded") end
  local attributes = before and before ~= "" and { before = before } or {}
  return pandoc.Div(blocks, pandoc.Attr(div.identifier, div.classes, attributes))
end
