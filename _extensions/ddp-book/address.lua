-- `repo:` stands for the repository's address: `[the licence](repo:LICENSE)`, `git clone repo: folder`.
-- `colab:` and `kaggle:` open a notebook of it there.

local import = ...
local errors = import "errors"
local project = import "project"

local PLACES = { colab = "Colab", kaggle = "Kaggle" }

local function open(element)
  local place, path = element.target:match("^(%l+):(.*%.ipynb)$")
  if not PLACES[place] then return nil end
  if not project.read(path) then errors.stop(("%s: it opens %s: there is no such file"):format(project.page, path)) end
  local address = project.open_in(PLACES[place], path)
  return address and pandoc.Link(element.content, address) or element.content
end

local function link(element)
  local path = element.target:match("^repo:(.*)$")
  if not path then return open(element) end
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
