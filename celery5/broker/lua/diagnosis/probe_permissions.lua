-- Try the commands that celery5 uses on a scratch key, and return those that this user may not run.
-- The key is a string, so what is permitted fails on its type: no data is written. Without SET nothing is
-- tried.
-- KEYS  1 an unused key
-- ARGV  1 an unused channel
-- Returns how many were tried, then for each that was refused its name and why.
local key, channel = KEYS[1], ARGV[1]
local tried, refused = 0, {}
local function try(...)
  tried = tried + 1
  local answer = redis.pcall(...)
  local why = type(answer) == 'table' and answer.err
  if why and not why:find('READONLY') and (why:find('ermission') or why:find("can't") or why:find('NOPERM')) then
    refused[#refused + 1] = (select(1, ...))
    refused[#refused + 1] = why
  end
end
try('SET', key, '', 'PX', 10000)
if #refused == 0 then
  for _, name in ipairs({ 'GET', 'EXISTS', 'PTTL', 'HGETALL', 'HKEYS', 'HLEN', 'HVALS', 'SMEMBERS', 'XLEN', 'ZCARD', 'MGET', 'LLEN', 'LPOP', 'RPOP', 'PERSIST' }) do -- bound: fifteen commands
    try(name, key)
  end
  try('TIME')
  try('PUBLISH', channel, '')
  try('PEXPIRE', key, 10000)
  try('PEXPIREAT', key, 4102444800000)
  try('PEXPIRE', key, 10000)
  try('HGET', key, 'a')
  try('HMGET', key, 'a')
  try('HEXISTS', key, 'a')
  try('HDEL', key, 'a')
  try('HSET', key, 'a', 'b')
  try('HSETNX', key, 'a', 'b')
  try('HINCRBY', key, 'a', 1)
  try('HSCAN', key, 0)
  try('HSTRLEN', key, 'a')
  try('SADD', key, 'a')
  try('SREM', key, 'a')
  try('RPUSH', key, 'a')
  try('LINDEX', key, 0)
  try('LTRIM', key, 0, 0)
  try('LRANGE', key, 0, 0)
  try('LREM', key, 0, 'a')
  try('GETBIT', key, 0)
  try('SETBIT', key, 'a', 0)
  try('BITPOS', key, 2)
  try('BITFIELD', key, 'GET', 'a', 0)
  try('BITOP', 'AND', key)
  try('ZADD', key, 1, 'a')
  try('ZREM', key, 'a')
  try('ZSCORE', key, 'a')
  try('ZRANK', key, 'a')
  try('ZPOPMIN', key)
  try('ZRANDMEMBER', key)
  try('ZCOUNT', key, 0, 1)
  try('ZRANGE', key, 0, 0)
  try('ZREVRANGE', key, 0, 0)
  try('ZRANGEBYSCORE', key, 0, 1)
  try('ZRANGEBYLEX', key, '-', '+')
  try('ZLEXCOUNT', key, '-', '+')
  try('ZREMRANGEBYSCORE', key, 0, 1)
  try('ZREMRANGEBYRANK', key, 0, 0)
  try('XADD', key, '*', 'a', 'b')
  try('XDEL', key, '1-1')
  try('XTRIM', key, 'MAXLEN', 1)
  try('XRANGE', key, '-', '+')
  try('XREVRANGE', key, '+', '-')
  try('XGROUP', 'CREATE', key, 'a', '0')
  try('XINFO', 'GROUPS', key)
  try('XREADGROUP', 'GROUP', 'a', 'b', 'STREAMS', key, '>')
  try('XPENDING', key, 'a')
  try('XACK', key, 'a', '1-1')
  try('XAUTOCLAIM', key, 'a', 'b', 1000, '0')
  try('UNLINK', key)
  try('DEL', key)
end
return { tried, unpack(refused) }
