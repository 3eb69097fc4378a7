// SPDX-License-Identifier: Apache-2.0
// Records are sent as they lie in memory: plain structs of fixed size, equal on every little-endian machine. The hash
// of a field's whole text decides whether ranks agree, and the text, shortened if necessary, explains. If ranks differ
// in a tensor, a second exchange sends the fields of all tensors; every rank sees from the first that it is needed.
#include "collective/handshake.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <array>
#include <cstring>
#include <map>

#include "core/bits.h"
#include "core/check.h"
#include "core/float_mode.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

constexpr uint32_t kRecordMagic = 0x67777367;  // "gwsg"

struct Word {
  uint64_t hash;
  char text[120];
};

void set_text(std::span<char> to, const std::string& text) {
  std::memset(to.data(), 0, to.size());
  if (text.size() < to.size()) {
    std::memcpy(to.data(), text.data(), text.size());
  } else {
    std::memcpy(to.data(), text.data(), to.size() - 4);
    std::memcpy(to.data() + to.size() - 4, "...", 3);
  }
}

std::string get_text(std::span<const char> from) { return std::string(from.data(), strnlen(from.data(), from.size())); }

Word word(const std::string& text) {
  Word w;
  w.hash = XXH64(text.data(), text.size(), 0);
  set_text(w.text, text);
  return w;
}

std::string message_of(const std::exception_ptr& failure) {
  if (!failure) return {};
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown error";
  }
}

template <class Record>
std::vector<Record> exchange(Engine& engine, std::span<const Record> mine) {
  std::vector<Record> all(mine.size() * static_cast<size_t>(engine.size()));
  std::vector<Bytes> recv;
  for (size_t p = 0; p < static_cast<size_t>(engine.size()); ++p)
    recv.push_back(std::as_writable_bytes(std::span(all).subspan(p * mine.size(), mine.size())));
  engine.all_gather(std::as_bytes(mine), recv).wait();
  return all;
}

// The value that most ranks have is taken for right; of two equally common ones, that of the lower rank.
template <class Value>
void check_same(const char* field, const std::string& where, size_t world, Value&& value) {
  std::map<uint64_t, size_t> votes;
  for (size_t p = 0; p < world; ++p) ++votes[value(p).hash];
  if (votes.size() == 1) return;
  size_t right = 0;
  for (size_t p = 1; p < world; ++p)
    if (votes[value(p).hash] > votes[value(right).hash]) right = p;
  std::vector<size_t> wrong;
  for (size_t p = 0; p < world; ++p)
    if (value(p).hash != value(right).hash) wrong.push_back(p);
  const std::string who = wrong.size() == 1 ? fmt::format("rank {} disagrees", wrong.front())
                                            : fmt::format("ranks {} disagree", fmt::join(wrong, ", "));
  throw Error(ErrorKind::mismatch,
              fmt::format("{} with rank {} about {}{}: '{}' on rank {} against '{}'", who, right, field, where,
                          get_text(value(wrong.front()).text), wrong.front(), get_text(value(right).text)),
              field, static_cast<int>(wrong.front()));
}

// Throws the failure of this rank as it is, and that of another rank as a mismatch that quotes it.
void check_ready(const std::exception_ptr& failure, size_t world, const auto& failed, const auto& text) {
  if (failure) std::rethrow_exception(failure);
  for (size_t p = 0; p < world; ++p)
    if (failed(p))
      throw Error(ErrorKind::mismatch, fmt::format("rank {} cannot take part: {}", p, text(p)), "ready",
                  static_cast<int>(p));
}

struct AgreeRecord {
  uint32_t magic;
  uint32_t failed;
  int64_t node;
  uint64_t tensors;
  uint64_t tensors_hash;
  Word failure;
  std::array<Word, kCommonFields> fields;
};
static_assert(sizeof(AgreeRecord) == 32 + 128 * (1 + kCommonFields));

struct StepRecord {
  uint64_t agreed;
  uint64_t step;
  uint32_t scale_bits;
  uint32_t failed;
  char failure[104];
};
static_assert(sizeof(StepRecord) == 128);

uint64_t hash_tensors(const Handshake& handshake) {
  uint64_t hash = 0;
  for (const auto& tensor : handshake.tensors)
    for (const HandshakeField& field : tensor) hash = XXH64(field.text.data(), field.text.size(), hash);
  return hash;
}

}  // namespace

uint64_t Handshake::hash() const {
  uint64_t hash = hash_tensors(*this);
  for (const HandshakeField& field : common) hash = XXH64(field.text.data(), field.text.size(), hash);
  return hash;
}

std::vector<int> agree(Engine& engine, const Handshake& handshake, std::exception_ptr failure) {
  const auto world = static_cast<size_t>(engine.size());
  if (world == 1) {
    if (failure) std::rethrow_exception(failure);
    return {handshake.node};
  }
  GW_CHECK(failure || handshake.common.size() <= kCommonFields);
  AgreeRecord mine{};
  mine.magic = kRecordMagic;
  mine.failed = failure != nullptr;
  mine.node = handshake.node;
  mine.failure = word(message_of(failure));
  if (!failure) {
    mine.tensors = handshake.tensors.size();
    mine.tensors_hash = hash_tensors(handshake);
    for (size_t i = 0; i < handshake.common.size(); ++i) mine.fields[i] = word(handshake.common[i].text);
  }
  const auto all = exchange<AgreeRecord>(engine, std::span(&mine, 1));

  for (size_t p = 0; p < world; ++p)
    if (all[p].magic != kRecordMagic)
      throw Error(ErrorKind::mismatch, fmt::format("rank {} is doing something else: it sent no handshake", p),
                  "handshake", static_cast<int>(p));
  check_ready(
      failure, world, [&](size_t p) { return all[p].failed != 0; },
      [&](size_t p) { return get_text(all[p].failure.text); });
  for (size_t i = 0; i < handshake.common.size(); ++i)
    check_same(handshake.common[i].name, "", world, [&](size_t p) -> const Word& { return all[p].fields[i]; });
  check_same("tensors", " (how many)", world, [&](size_t p) { return word(std::to_string(all[p].tensors)); });

  bool same = true;
  std::vector<int> nodes;
  for (size_t p = 0; p < world; ++p) {
    same &= all[p].tensors_hash == all[0].tensors_hash;
    nodes.push_back(static_cast<int>(all[p].node));
  }
  if (same) return nodes;
  std::vector<Word> rows;
  for (const auto& tensor : handshake.tensors)
    for (const HandshakeField& field : tensor) rows.push_back(word(field.text));
  const auto theirs = exchange<Word>(engine, rows);
  for (size_t i = 0; i < handshake.tensors.size(); ++i)
    for (size_t f = 0; f < kTensorFields; ++f)
      check_same(handshake.tensors[i][f].name,
                 fmt::format(" of tensor {} ('{}' here)", i, handshake.tensors[i][0].text), world,
                 [&](size_t p) -> const Word& { return theirs[p * rows.size() + i * kTensorFields + f]; });
  throw Error(ErrorKind::mismatch, "ranks disagree about the tensors, but no field shows how", "tensors");
}

void agree_step(Engine& engine, uint64_t agreed, uint64_t step, float loss_scale, std::exception_ptr failure) {
  const auto world = static_cast<size_t>(engine.size());
  if (world == 1) {
    if (failure) std::rethrow_exception(failure);
    return;
  }
  StepRecord mine{};
  mine.agreed = agreed;
  mine.step = step;
  mine.scale_bits = float_bits(loss_scale);
  mine.failed = failure != nullptr;
  set_text(mine.failure, message_of(failure));
  const auto all = exchange<StepRecord>(engine, std::span(&mine, 1));
  check_ready(
      failure, world, [&](size_t p) { return all[p].failed != 0; }, [&](size_t p) { return get_text(all[p].failure); });
  check_same("handshake", " (another collective or list of tensors is run)", world,
             [&](size_t p) { return word(fmt::format("{:016x}", all[p].agreed)); });
  check_same("step", "", world, [&](size_t p) { return word(std::to_string(all[p].step)); });
  check_same("loss_scale", "", world, [&](size_t p) { return word(fmt::format("{}", bits_float(all[p].scale_bits))); });
}

void take_part(Engine& engine, const std::function<void()>& prepare,
               const std::function<void(std::exception_ptr)>& agree, const std::function<void()>& move) {
  std::exception_ptr failure;
  try {
    prepare();
  } catch (...) {
    failure = std::current_exception();
  }
  agree(failure);
  try {
    const FloatMode ieee;  // the caller's float mode would change bits on this rank alone
    move();
  } catch (...) {
    engine.poison(fmt::format("rank {} failed: {}", engine.rank(), message_of(std::current_exception())));
    throw;
  }
}

uint64_t agree_step_bytes(int world) { return sizeof(StepRecord) * static_cast<uint64_t>(world - 1); }

}  // namespace gradwire
