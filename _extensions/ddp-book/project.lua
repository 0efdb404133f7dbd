-- Where things are: the book's folder, the page being rendered, links from it.

local _, here = ...

local M = {}

-- A folder as the system calls it: absolute, without `.`, `..` and symbolic links.
local function absolute(folder)
  local path = pandoc.system.with_working_directory(folder, pandoc.system.get_working_directory)
  return (path:gsub("\\", "/"))
end

-- Quarto renders a temporary copy, and names the page itself.
local function input_file()
  if quarto then return quarto.doc.input_file end
  return PANDOC_STATE.input_files[1]
end

M.root = absolute(pandoc.path.join { here, "..", ".." })

local input = input_file()
local folder = input and input ~= "-" and absolute(pandoc.path.directory(input))
M.page = folder and pandoc.path.make_relative(folder .. "/" .. pandoc.path.filename(input), M.root):gsub("\\", "/")
  or "standard input"

-- The text of a file of the book, or nil.
function M.read(path)
  local file = io.open(M.root .. "/" .. path, "rb")
  if not file then return nil end
  local text = file:read("a")
  file:close()
  return text and (text:gsub("\r\n", "\n"))
end

-- The names in a folder of the book that match the pattern, sorted.
function M.list(folder, pattern)
  local found = {}
  local listed, names = pcall(pandoc.system.list_directory, M.root .. "/" .. folder)
  for _, name in ipairs(listed and names or {}) do
    if name:match(pattern) then table.insert(found, name) end
  end
  table.sort(found)
  return found
end

-- A link from this page to a file of the book.
function M.link(path)
  local link = pandoc.path.make_relative("/" .. path, pandoc.path.directory("/" .. M.page), true)
  return (link:gsub("\\", "/"))
end

local function setting(name)
  return (M.read("_quarto.yml") or ""):match("\n%s*" .. name .. ":%s*[\"']?([^%s\"'#]+)")
end

-- The repository's address, as _quarto.yml gives it, or nil.
function M.repository()
  local address = setting "repo%-url"
  return address and (address:gsub("/+$", ""))
end

local OPENERS = {
  Colab = "https://colab.research.google.com/github/%s/blob/%s/%s",
  Kaggle = "https://www.kaggle.com/kernels/welcome?src=https://github.com/%s/blob/%s/%s",
}

-- The address that opens a notebook of the repository in Colab or Kaggle, which read from GitHub only; or nil.
function M.open_in(place, path)
  local name = (M.repository() or ""):match("^https://github%.com/(.+)$")
  return name and OPENERS[place]:format(name, setting "repo%-branch" or "main", path)
end

-- `inlines` as a link to a file of the repository, where _quarto.yml says where that is.
function M.source_link(inlines, path)
  local address = M.repository()
  if not address then return pandoc.Inlines(inlines) end
  local target = ("%s/blob/%s/%s"):format(address, setting "repo%-branch" or "main", path)
  return pandoc.Inlines { pandoc.Link(inlines, target) }
end

return M
