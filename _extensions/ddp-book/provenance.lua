-- Says where a recording comes from: in one line, and as a table. tools/check.py sees to it that a recording
-- carries what is read here.

local import = ...
local project = import "project"
local recording = import "recording"
local sorted_keys = import "sorted_keys"

local M = {}

local UNCHANGED = "the code changed since, its behaviour did not"
local STALE = "recorded before the latest change of this code"
local COMPUTED = "Computed, not measured"
local STATUS = pandoc.json.decode(project.read("recordings/status.json") or "{}", false)

-- "2", "2 and 4", "2, 3 and 4"
local function enumerate(words)
  if #words < 2 then return words[1] end
  return table.concat(words, ", ", 1, #words - 1) .. " and " .. words[#words]
end

function M.ranks(meta, of_cell)
  local found = of_cell or meta.world_size
  local largest = math.max(table.unpack(found))
  local sizes = pandoc.List(found):map(function(size) return ("%d"):format(size) end)
  local text = enumerate(sizes) .. (largest == 1 and " rank" or " ranks")
  if meta.kind ~= "gpu" then return text end
  local gpus = meta.device_count
  return ("%s %s %d %s"):format(text, largest > gpus and "sharing" or "on", gpus, gpus == 1 and "GPU" or "GPUs")
end

function M.torch(meta)
  local version = meta.versions.torch
  return version and (version:gsub("%+.*$", ""))
end

function M.device(meta)
  if meta.device_count > 1 then return ("%d × %s"):format(meta.device_count, meta.device) end
  return (meta.device:gsub(" CPU$", ""))
end

function M.commit(meta) return meta.commit:sub(1, 7) .. (meta.dirty and " with local changes" or "") end

local function status_of(one) return STATUS[one.name] or {} end

-- Whether the code has changed since.
function M.is_stale(one) return status_of(one)[one.kind] == "stale" end

-- On what a cell ran, as tools/ranks.py says: "computed", "all" ranks of the run, or numbers such as "2 5" and "0".
local function ran(one, cell_name) return (status_of(one).cells or {})[cell_name] or "all" end

-- "2 and 4 ranks over gloo", of all cells or of the one that claims so
function M.ranks_of(one, claim)
  if claim == "0" then return "no ranks" end
  local sizes, started = pandoc.List {}, pandoc.List(one.meta.world_size)
  for size in (claim or ""):gmatch "%d+" do
    local number = math.tointeger(size)
    if number == 1 or started:includes(number) then sizes:insert(number) end -- GPUs may be fewer
  end
  local backend = enumerate(one.meta.backend)
  return M.ranks(one.meta, #sizes > 0 and sizes or nil) .. (backend and " over " .. backend or "")
end

-- "CPU recording · 2-core AMD EPYC · 2 and 4 ranks over gloo · torch 2.13.0 · 2026-11-21 · commit abc1234",
-- "Computed, not measured · 2026-11-21 · commit abc1234"
function M.line(one, cell_name)
  local meta, parts, claim = one.meta, { COMPUTED }, ran(one, cell_name)
  if claim ~= "computed" then
    local torch = M.torch(meta)
    parts = { one.kind:upper() .. " recording", M.device(meta), M.ranks_of(one, claim), torch and "torch " .. torch }
  end
  table.insert(parts, meta.date)
  table.insert(parts, "commit " .. M.commit(meta))
  if meta.accepted then table.insert(parts, UNCHANGED) end -- the run's page says why
  if M.is_stale(one) then table.insert(parts, STALE) end
  return table.concat(parts, " · ")
end

-- The line under an output, linked to the run's page.
function M.badge(one, cell_name)
  local classes = { "provenance", ran(one, cell_name) == "computed" and "computed" or one.kind }
  if M.is_stale(one) then table.insert(classes, "stale") end
  local link = pandoc.Link(M.line(one, cell_name), project.link("runs/" .. one.name .. ".qmd"))
  return pandoc.Div({ pandoc.Plain { link } }, pandoc.Attr("", classes))
end

-- A badge that the section has already, short: what it is, with the whole of it as a tooltip.
local function mark(badge, link, text)
  local short = text:match("^(.-) · ") .. (badge.classes:includes "stale" and ", older than the code" or "")
  badge.classes:insert("mark")
  badge.content = { pandoc.Plain { pandoc.Link(short, link.target, "", pandoc.Attr("", {}, { ["data-tip"] = text })) } }
  return badge
end

local function is_badge(div) return div.classes:includes "provenance" end

-- The page's blocks with each badge in full once in a section, and as a mark where it comes again. One
-- that is folded away counts only there.
local function once_in_a_section(blocks)
  local scopes = { {} }
  local function shorten(div)
    if not is_badge(div) then return nil end
    local link, text = nil, pandoc.utils.stringify(div)
    div:walk { Link = function(found) link = link or found end }
    if not link then return nil end
    local key, seen = link.target .. text, scopes[#scopes]
    if seen[key] then return mark(div, link, text) end
    seen[key] = true
  end
  local function fold(raw)
    if raw.text:match("^<details") then table.insert(scopes, setmetatable({}, { __index = scopes[#scopes] })) end
    if raw.text:match("^</details") then table.remove(scopes) end
  end
  return pandoc.Blocks(blocks:map(function(block)
    if block.t == "Header" and block.level <= 2 then scopes = { {} } end
    return pandoc.Blocks({ block }):walk({ traverse = "topdown", Div = shorten, RawBlock = fold })[1]
  end))
end

-- The page's blocks without needless badges: one at the head is enough if all say the same.
function M.shorten(blocks)
  local badges = pandoc.List {}
  local function take(div)
    if not is_badge(div) then return nil end
    badges:insert(div)
    return {}
  end
  local bare = blocks:walk { Div = take }
  local another = badges:find_if(function(badge) return badge ~= badges[1] end)
  if #badges < 2 or another then return once_in_a_section(blocks) end
  local said = pandoc.Span(pandoc.Inlines "All outputs of this page: " .. badges[1].content[1].content)
  badges[1].content = { pandoc.Plain { said } }
  return pandoc.Blocks { badges[1] } .. bare
end

local function commit_inlines(meta)
  local commit, repository = M.commit(meta), project.repository()
  if not repository or meta.accepted then return commit end -- a squash may have taken it away
  return pandoc.Inlines { pandoc.Link(commit, repository .. "/commit/" .. meta.commit) }
end

local function code_list(names)
  local codes = pandoc.List(names):map(function(name) return pandoc.Plain { pandoc.Code(name) } end)
  return pandoc.utils.blocks_to_inlines(codes, { pandoc.Str ",", pandoc.Space() })
end

local function versions(meta)
  local packages = pandoc.List(sorted_keys(meta.versions))
  return table.concat(packages:map(function(package) return package .. " " .. meta.versions[package] end), ", ")
end

-- The rows of a run's table: { name, inlines }.
function M.facts(one)
  local meta, rows = one.meta, {}
  local function row(name, content)
    if content and #content > 0 then table.insert(rows, { name, pandoc.Inlines(content) }) end
  end
  local data = recording.present(meta.data)
  row("Recording", one.kind:upper() .. (M.is_stale(one) and ", " .. STALE or ""))
  row("Device", M.device(meta))
  row("Ranks", M.ranks(meta))
  row("Backend", enumerate(meta.backend))
  row("Versions", versions(meta))
  row("Data", data and data.name)
  row("Date", meta.date)
  row("Commit", commit_inlines(meta))
  for _, said in ipairs(meta.accepted or {}) do
    row("Same behaviour", ("%s (%s, commit %s)"):format(said.reason, said.date, said.commit:sub(1, 7)))
  end
  row("Command", { pandoc.Code(meta.command) })
  row("Duration", ("%.1f s"):format(meta.seconds))
  row("Code", code_list(sorted_keys(meta.symbols)))
  return rows
end

return M
