-- `.reference`: the public names of a package and their docstrings, module by module, or of some `modules`. Ours,
-- because quartodoc needs Python before each render, to write the pages, and `quarto render` does without.

local import = ...
local project = import "project"
local python = import "python"
local split_lines = import("statements").split_lines

local FORMAT = "commonmark+pipe_tables+smart"
local SECTIONS = { Args = "Arguments", Attributes = "Attributes", Raises = "Raises" }

local function is_public(path) return not ("." .. path):find("%._") end

local function dedent(lines, first, last)
  local margin, kept = nil, {}
  for number = first, last do
    local space = lines[number]:match("^( *)%S")
    margin = space and math.min(margin or #space, #space) or margin
  end
  for number = first, last do table.insert(kept, (lines[number]:sub((margin or 0) + 1))) end
  return table.concat(kept, "\n")
end

-- Without quotes and indent, which the first line has not.
local function docstring(lines, about)
  local text = dedent(lines, about[1], about[1]) .. "\n" .. dedent(lines, about[1] + 1, about[2])
  return text:match('^r?"""%s*(.-)%s*"""')
end

local function markdown(text)
  return pandoc.read(text .. "\n", FORMAT).blocks:walk {
    RawInline = function(raw) return pandoc.Str(raw.text) end,
    RawBlock = function(raw) return pandoc.Para(pandoc.Str(raw.text)) end,
  }
end

-- `name: what it is` on each line, the next one indented where it goes on.
local function items(text)
  return markdown((text:gsub("\n    +", " "):gsub("%f[^\n%z]%s*([^:\n]+):%s*", "- `%1`: ")))
end

local function docstring_blocks(text)
  local blocks = pandoc.Blocks {}
  for part in (text .. "\n\n"):gsub("\n%s*\n", "\n\n"):gmatch("(.-)\n\n") do
    local title, rest = part:match("^(%u%l+):\n(    .+)$")
    if SECTIONS[title] then
      blocks:insert(pandoc.Para { pandoc.Str(SECTIONS[title] .. ":") })
      blocks:extend(items(dedent(split_lines(rest), 1, #split_lines(rest))))
    else
      blocks:extend(markdown(title == "Returns" and "Returns: " .. rest:gsub("^%s+", "") or part))
    end
  end
  return blocks
end

-- The definitions right inside of one, each with its name.
local function members(owner, all)
  local found = {}
  for _, inner in ipairs(all) do
    local name = inner.path:match("^" .. owner.path .. "%.([%w_]+)$")
    if name then table.insert(found, { name = name, of = inner }) end
  end
  return found
end

-- A class shows its fields and how it is made, what is made of a class how it is called.
local function signature(definition, shown, all, lines)
  local parts = { dedent(lines, definition.first, definition.head) }
  local special = shown == definition and "__init__" or "__call__"
  for _, member in ipairs(shown.kind == "class" and members(shown, all) or {}) do
    if member.name == special or shown == definition and member.of.kind == "value" and is_public(member.name) then
      table.insert(parts, "    " .. dedent(lines, member.of.first, member.of.head):gsub("\n", "\n    "))
    end
  end
  return pandoc.CodeBlock(table.concat(parts, "\n"), { class = "signature" })
end

-- `get = _Get()` is what its class says it is.
local function made_of(definition, all, lines)
  local kind = definition.kind == "value" and lines[definition.first]:match("^[%w_]+ = (_%w+)%(%)$")
  for _, other in ipairs(kind and all or {}) do
    if other.path == kind then return other end
  end
  return definition
end

-- The documented public names of a module, in the order of the source: { path, blocks }.
local function documented(text)
  local lines, found = split_lines(text), {}
  local all = python.definitions(text, lines)
  local function add(definition, path)
    local shown = made_of(definition, all, lines)
    if not shown.about or definition.inside_function then return end
    local blocks = pandoc.Blocks { signature(definition, shown, all, lines) }
    blocks:extend(docstring_blocks(docstring(lines, shown.about)))
    table.insert(found, { path = path, blocks = blocks })
    for _, member in ipairs(shown.kind == "class" and members(shown, all) or {}) do
      if member.of.kind == "function" and is_public(member.name) then add(member.of, path .. "." .. member.name) end
    end
  end
  for _, definition in ipairs(all) do
    if is_public(definition.path) and not definition.path:find(".", 1, true) then
      add(definition, definition.path)
    end
  end
  return found
end

local function identifier(path) return "api-" .. path:gsub("%.", "-") end

local function heading(level, path, title)
  return pandoc.Header(level, { pandoc.Code(title or path) }, pandoc.Attr(identifier(path)))
end

-- "`import miniddp` gives you …", where the package says what it exports.
local function exports(package, text, home, fail)
  local inlines = pandoc.Inlines {}
  for name in (text:match("__all__ = %[(.-)%]") or ""):gmatch('"([^"]+)"') do
    if not home[name] then fail(("src/%s/__init__.py exports %s, which no module documents"):format(package, name)) end
    inlines:extend { pandoc.Str(#inlines > 0 and "," or " gives you"), pandoc.Space() }
    inlines:insert(pandoc.Link({ pandoc.Code(name) }, "#" .. identifier(home[name] .. "." .. name)))
  end
  inlines:insert(pandoc.Str ".")
  return pandoc.Blocks { pandoc.Para { pandoc.Code("import " .. package), table.unpack(inlines) } }
end

-- The paths of the modules in a folder, then of those in the folders inside it.
local function modules(folder)
  local function inside(name) return folder .. "/" .. name end
  local paths = pandoc.List(project.list(folder, "^%a.*%.py$")):map(inside)
  for _, room in ipairs(project.list(folder, "^%a[^.]*$")) do paths:extend(modules(inside(room))) end
  return paths
end

return function(div, fail)
  local package = div.attributes.package or fail('expected package="name"')
  local some = div.attributes.modules
  local paths = some and pandoc.List {} or modules("src/" .. package)
  for name in (some or ""):gmatch "%S+" do paths:insert(("src/%s/%s.py"):format(package, name)) end
  if #paths == 0 then fail("there are no modules in src/" .. package) end
  local home, blocks = {}, pandoc.Blocks {}
  for _, path in ipairs(paths) do
    local module = path:match("^src/(.+)%.py$"):gsub("/__init__$", ""):gsub("/", ".")
    local text = project.read(path) or fail("there is no " .. path)
    local about = text:match('^r?"""(.-)"""') or fail(path .. " has no docstring")
    blocks:insert(heading(3, module))
    blocks:extend(docstring_blocks(about))
    blocks:insert(pandoc.Div({ pandoc.Plain(project.source_link({ pandoc.Str(path) }, path)) }, { class = "api-source" }))
    for _, each in ipairs(documented(text)) do
      home[each.path] = home[each.path] or module
      local _, depth = each.path:gsub("%.", "")
      blocks:insert(heading(4 + depth, module .. "." .. each.path, each.path))
      blocks:extend(each.blocks)
    end
  end
  return some and blocks or exports(package, project.read("src/" .. package .. "/__init__.py"), home, fail) .. blocks
end
