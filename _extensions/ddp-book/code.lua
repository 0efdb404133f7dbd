-- `.code`: quotes a symbol of the package, or a file, with annotations beside it.

local import = ...
local annotations = import "annotations"
local frame = import "frame"
local needs = import "needs"
local project = import "project"
local python = import "python"
local split_lines = import("statements").split_lines

local annotated = 0 -- quotes with notes on this page so far

local LANGUAGES = { py = "python", sh = "bash", yml = "yaml", md = "markdown" }

-- The file that holds a module of the package, or nil.
local function module_file(module)
  local path = "src/" .. module:gsub("%.", "/")
  for _, candidate in ipairs { path .. ".py", path .. "/__init__.py" } do
    if project.read(candidate) then return candidate end
  end
end

-- The file that is quoted and, unless it is quoted whole, the name in it.
local function target(attributes, fail)
  if attributes.file then return attributes.file, attributes.symbol end
  local module, name = (attributes.symbol or ""):match("^([%w_.]+):([%w_.]+)$")
  if not module then fail('expected symbol="package.module:name" or file="path"') end
  return module_file(module) or fail("no such module: there is no src/" .. module:gsub("%.", "/") .. ".py"), name
end

local function quoted_lines(path, name, attributes, fail)
  local text = project.read(path) or fail("no such file: " .. path)
  if not name then return split_lines((text:gsub("%s+$", ""))) end
  local lines, problem = python.quote(text, name, attributes.docstring == "no", attributes.members)
  if lines then return lines end
  fail(("%s in %s (it has: %s)"):format(problem, path, table.concat(python.names(text), ", ")))
end

return function(div, fail)
  local path, name = target(div.attributes, fail)
  local lines = quoted_lines(path, name, div.attributes, fail)
  local notes = annotations.find(div, lines, "the quoted part of " .. path, fail)
  local before = name and path:match("%.py$") and needs.of(project.read(path), path, name, table.concat(lines, "\n"))
  local extension = path:match("%.(%w+)$") or "text"
  local code = pandoc.CodeBlock(table.concat(lines, "\n"), { class = LANGUAGES[extension] or extension })
  local blocks = pandoc.Blocks { code }
  if #notes > 0 then
    annotated = annotated + 1
    code.identifier = "listing-" .. annotated
    local html = pandoc.write(pandoc.Pandoc { code }, "html"):gsub("<a [^>]*></a>", "")
    blocks = annotations.beside(html, notes, lines, code.identifier)
  end
  return frame(div, path, div.attributes.members and "in part", blocks, before)
end
