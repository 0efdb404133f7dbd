-- `repo:` stands for the repository's address: `[the licence](repo:LICENSE)`, `git clone repo: folder`.

local import = ...
local errors = import "errors"
local project = import "project"

local function link(element)
  local path = element.target:match("^repo:(.*)$")
  if not path then return nil end
  if not project.read((path:gsub("#.*$", ""))) then
    errors.stop(("%s: it links to repo:%s: there is no such file"):format(project.page, path))
  end
  return project.source_link(element.content, path)
end

local function commands(block)
  if not block.text:find("git clone repo:", 1, true) then return nil end
  local address = project.repository() or errors.stop("_quarto.yml has no repo-url: what should be cloned?")
  block.text = block.text:gsub("git clone repo:", function() return "git clone " .. address end)
  return block
end

return function(blocks) return blocks:walk { Link = link, CodeBlock = commands } end
