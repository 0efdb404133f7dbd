-- `.versions`: what the recordings were made with. `.cite`: how to cite the book. `.document`: a text of
-- the repository, such as its changelog.

local import = ...
local make_table = import "table"
local project = import "project"
local provenance = import "provenance"
local recording = import "recording"
local sorted_keys = import "sorted_keys"

local M = {}

local KINDS = pandoc.List { "cpu", "gpu" }

-- name → kind → every version that the recordings of that kind were made with
local function versions_of_recordings(fail)
  local found = { Device = { cpu = {}, gpu = {} } } -- each a set
  for _, run in ipairs(recording.runs()) do
    for _, one in ipairs(recording.existing(run, fail)) do
      found.Device[one.kind][provenance.device(one.meta)] = true
      for name, version in pairs(one.meta.versions) do
        found[name] = found[name] or { cpu = {}, gpu = {} }
        found[name][one.kind][version:gsub("%+.*$", "")] = true
      end
    end
  end
  return found
end

function M.versions(div, fail)
  local found = versions_of_recordings(fail)
  local kinds = KINDS:filter(function(kind) return next(found.Device[kind]) end)
  local header, rows = { "", table.unpack(kinds:map(function(kind) return kind:upper() .. " recordings" end)) }, {}
  if #kinds == 0 then fail("there are no recordings") end
  for _, name in ipairs(sorted_keys(found)) do
    local cells = kinds:map(function(kind) return table.concat(sorted_keys(found[name][kind]), ", ") end)
    table.insert(rows, { name, table.unpack(cells) })
  end
  div.content = { make_table(header, rows) }
  return div
end

local CITATION = [[
@software{%s,
  title   = {%s},
  author  = {%s},
  year    = {%s},
  version = {%s},
  url     = {%s}
}]]

local function text_of(value) return value and pandoc.utils.stringify(value) end

-- An author as BibTeX has it: a person, or an organisation in braces of its own.
local function author(entry)
  if entry.name then return "{" .. text_of(entry.name) .. "}" end
  return text_of(entry["family-names"]) .. ", " .. text_of(entry["given-names"])
end

function M.cite(div, fail)
  local file = project.read("CITATION.cff") or fail("there is no CITATION.cff")
  local fields = pandoc.read("---\n" .. file .. "\n---\n", "markdown-smart").meta
  local function field(name) return text_of(fields[name]) or fail("CITATION.cff has no " .. name) end
  local authors = pandoc.List(fields.authors or fail "CITATION.cff has no authors"):map(author)
  local title = field "title"
  local text = CITATION:format(
    title:lower():gsub("%W+", "-"), title, table.concat(authors, " and "),
    field("date-released"):sub(1, 4), field "version", field "repository-code"
  )
  div.content = { pandoc.CodeBlock(text, { class = "text" }) }
  return div
end

function M.document(div, fail)
  local path = div.attributes.file or fail('expected file="path"')
  local text = project.read(path) or fail("no such file: " .. path)
  local blocks = pandoc.read(text, "markdown").blocks
  if blocks[1] and blocks[1].t == "Header" and blocks[1].level == 1 then blocks:remove(1) end
  div.content = blocks:walk {
    Header = function(header)
      header.level = header.level + 1
      header.identifier = path:lower():gsub("%W+", "-") .. "-" .. header.identifier
      return header
    end,
  }
  div.attributes = {}
  return div
end

return M
