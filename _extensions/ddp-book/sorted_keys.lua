-- The keys of a map, sorted.

return function(map)
  local keys = {}
  for key in pairs(map) do table.insert(keys, key) end
  table.sort(keys)
  return keys
end
