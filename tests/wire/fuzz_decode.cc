// SPDX-License-Identifier: Apache-2.0
// libFuzzer gives arbitrary bytes to everything that reads foreign input: messages (as they come, with the checksums
// made right, and as a freshly encoded message with some bytes changed), spec strings as users write them and as
// messages carry them, rules, tables and residual files. Only gradwire::Error may come out; another exception, a
// sanitizer's report or a broken promise (trap) is a finding.
//
// The first byte chooses the way, except that what begins with the magic is a message: the golden frames are the seeds.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gradwire/error.h"
#include "gradwire/feedback.h"
#include "gradwire/learn.h"
#include "gradwire/message.h"
#include "gradwire/rules.h"
#include "gradwire/runner.h"
#include "message/layout.h"
#include "message/wire_offsets.h"

namespace {

using namespace gradwire;
using FuzzBytes = std::vector<std::byte>;

constexpr Limits kLimits{.max_elements = 1 << 18, .max_tensors = 1 << 12};

void promise(bool kept) {
  if (!kept) __builtin_trap();
}

template <class T>
T load(const FuzzBytes& bytes, size_t at) {
  T value{};
  if (at + sizeof value <= bytes.size()) std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}
template <class T>
void store(FuzzBytes& bytes, size_t at, T value) {
  if (at + sizeof value <= bytes.size()) std::memcpy(bytes.data() + at, &value, sizeof value);
}

// Reads one piece of input after another; zeros when it is used up.
struct FuzzInput {
  const uint8_t* data;
  size_t size;
  template <class T>
  T next() {
    T value{};
    const size_t n = size < sizeof value ? size : sizeof value;
    std::memcpy(&value, data, n);
    data += n;
    size -= n;
    return value;
  }
};

struct Way {
  DType dtype = DType::f32;
  Write write = Write::set;
  Device device = {};
};

// True if the message was taken.
bool decode(const FuzzBytes& message, const Way& way) {
  try {
    const Head head = read_head(message, kLimits);
    std::vector<TensorSpec> tensors = head.tensors;
    for (TensorSpec& t : tensors) t.dtype = way.dtype;
    const Plan plan(tensors);
    promise(plan.message_bytes() == message.size());
    const auto runner = make_runner(plan, way.device);
    std::vector<FuzzBytes> values;  // blocks of their own, so that a write beyond is seen
    std::vector<void*> outputs;
    for (const TensorSpec& t : tensors) outputs.push_back(values.emplace_back(t.count * bytes_of(t.dtype)).data());
    runner->decode(message, outputs, way.write);
    verify_body(message, head);  // what decode takes, this takes
    return true;
  } catch (const Error& e) {
    promise(e.kind() == ErrorKind::frame && !e.field().empty());
    return false;
  }
}

// Every way must agree; the message chooses which one is tried beside the first.
void decode_both(const FuzzBytes& message) {
  const Device scalar{.simd = "scalar"};
  static const std::vector<Way> ways = {{.device = scalar},
                                        {.write = Write::add},
                                        {.write = Write::add, .device = scalar},
                                        {.dtype = DType::f16},
                                        {.dtype = DType::f16, .device = scalar},
                                        {.dtype = DType::bf16, .device = scalar},
                                        {.device = {.threads = 2}}};
  const size_t last = message.empty() ? 0 : std::to_integer<size_t>(message.back());
  const bool taken = decode(message, {});
  promise(decode(message, ways[(message.size() + last) % ways.size()]) == taken);
}

void fuzz_message(const uint8_t* data, size_t size) {
  FuzzBytes message(size);
  if (size > 0) std::memcpy(message.data(), data, size);
  decode_both(message);
  store(message, wire::header::total_bytes, uint64_t{size});
  reseal(message);
  decode_both(message);
}

// A well-formed message of one to three tensors, some bytes of which are changed.
void fuzz_mutated(FuzzInput source) {
  static const std::vector<std::string> kSpecs = [] {
    std::vector<std::string> all;
    for (const CodecInfo& info : codecs()) all.insert(all.end(), info.specs.begin(), info.specs.end());
    return all;
  }();
  static constexpr std::array<uint32_t, 12> kCounts = {0, 1, 2, 31, 33, 63, 1023, 1024, 1025, 2500, 33000, 70000};
  std::vector<TensorSpec> tensors(source.next<uint8_t>() % 3 + 1);
  std::vector<std::vector<float>> values;
  std::vector<const void*> inputs;
  for (TensorSpec& t : tensors) {
    t.codec = Codec::parse(kSpecs[source.next<uint8_t>() % kSpecs.size()]);
    t.count = kCounts[source.next<uint8_t>() % kCounts.size()];
    t.name = std::string(1, static_cast<char>(source.next<uint8_t>()));
    // A shape of up to 8 dimensions, most of them 1, or none.
    const size_t dims = source.next<uint8_t>() % (kMaxDims + 1);
    t.shape.assign(dims, 1);
    if (dims) t.shape[source.next<uint8_t>() % dims] = t.count;
    values.emplace_back(t.count);
    // Either 16 values from the input over and over, of any kind (NaN too), or a plain ramp.
    std::array<float, 16> from;
    for (float& x : from) x = source.next<float>();
    const bool wild = source.next<uint8_t>() % 2;
    for (uint64_t i = 0; i < t.count; ++i)
      values.back()[i] = wild ? from[i % 16] : static_cast<float>(static_cast<int>((i * 37) % 101) - 50) * 0.01f;
    inputs.push_back(values.back().data());
    if (source.next<uint8_t>() % 2)
      t.codec = fit(t.codec, inputs.back(), t.count, DType::f32);  // with a table in the head
  }
  const Plan plan(tensors);
  FuzzBytes message(plan.message_bytes());
  const uint32_t world = source.next<uint8_t>() + 1u;
  const Stamp stamp{.seed = 1, .step = 2, .stage = 3, .rank = world - 1, .world = world};
  const auto runner = make_runner(plan, Device{});
  std::vector<std::vector<float>> before, after;  // wide enough for bf16 too
  std::vector<const void*> old_residuals;
  std::vector<void*> new_residuals;
  for (const TensorSpec& t : tensors) {
    old_residuals.push_back(before.emplace_back(t.count + 1).data());
    new_residuals.push_back(after.emplace_back(t.count + 1).data());
  }
  const uint8_t feedback = source.next<uint8_t>() % 3;
  const Residuals residuals{old_residuals, new_residuals, feedback == 1 ? DType::f32 : DType::bf16};
  runner->encode(inputs, stamp, message, feedback ? &residuals : nullptr);
  std::vector<std::vector<float>> out;
  std::vector<void*> outputs;
  for (const TensorSpec& t : tensors) outputs.push_back(out.emplace_back(t.count).data());
  runner->decode(message, outputs, Write::set, &stamp);  // what we encode, we decode

  const uint32_t head = load<uint32_t>(message, wire::header::head_bytes);
  size_t table = wire::header::size;
  size_t fitted = 0, extents = 0;  // the last word of a codec's table, if there is one; extents in the head
  for (const TensorSpec& t : tensors) extents += t.shape.size();
  for (uint32_t i = 0; i < load<uint32_t>(message, wire::header::spec_count); ++i) {
    const uint16_t words = load<uint16_t>(message, table + wire::spec::table_bytes) / 4;
    table += wire::spec::text + (load<uint16_t>(message, table) + 3u) / 4 * 4 + words * 4u;
    if (words) fitted = table - 4;
  }
  while (source.size > 0 && message.size() >= head) {
    const uint8_t how = source.next<uint8_t>();
    const uint32_t where = source.next<uint32_t>(), what = source.next<uint32_t>();
    const size_t words = (message.size() - head) / 4;
    const size_t shapes = table + tensors.size() * wire::row::size;
    switch (how % 10) {
      case 8:  // an extent
        if (extents) store(message, shapes + where % extents * wire::kExtentBytes, uint64_t{what} << where % 33);
        break;
      case 9:  // the number of dimensions
        store(message, table + where % tensors.size() * wire::row::size + wire::row::dims,
              static_cast<uint8_t>(what % 10));
        break;
      case 6:  // a word of a codec's table
        if (fitted) store(message, fitted - where % 7 * 4, what);
        break;
      case 0:
        message[where % message.size()] ^= std::byte(what);
        break;
      case 1:
        message[where % head] = std::byte(what);
        break;
      case 2:
        if (words > 0) store(message, head + where % words * 4, what);
        break;
      case 3:  // one of the last words: scales, indices
        if (words > 0) store(message, head + (words - 1 - where % 8 % words) * 4, what);
        break;
      case 4: {  // a field of the table, by a little
        const size_t at = table + where % tensors.size() * wire::row::size + what / 4 % 5 * 8;
        store(message, at, load<uint64_t>(message, at) ^ what % 4);
        break;
      }
      case 5:
        store(message, wire::header::total_bytes + where % 5 * 8, uint64_t{what});
        break;
      default:
        message.resize(wire::header::size + where % (message.size() - wire::header::size + 1));
        break;
    }
  }
  if (!source.next<uint8_t>()) store(message, wire::header::total_bytes, uint64_t{message.size()});
  reseal(message);
  decode_both(message);

  try {  // the same bytes to a receiver that knows its plan
    runner->decode(message, outputs, Write::set, &stamp);
  } catch (const Error& e) {
    promise(e.kind() == ErrorKind::frame && !e.field().empty());
  }
}

void fuzz_texts(const std::string& text) {
  try {
    const Codec codec = Codec::parse(text);
    promise(Codec::parse(codec.str()).str() == codec.str());
    promise(Codec::parse_wire(codec.wire_spec()).wire_spec() == codec.wire_spec());
    codec.bytes(1234567);
    codec.describe();
  } catch (const Error& e) {
    promise(e.kind() == ErrorKind::usage);
  }
  try {  // as a message has it
    const Codec codec = Codec::parse_wire(text);
    promise(Codec::parse(codec.str()).wire_spec() == codec.wire_spec());
  } catch (const Error& e) {
    promise(e.kind() == ErrorKind::usage);
  }
  try {
    const Rules rules = Rules::parse(text);
    promise(Rules::parse(rules.str()).str() == rules.str());
    rules.codec_for("layer1.weight", 2, 1000);
    rules.codec_for(text.substr(0, 32), 1, 10);
  } catch (const Error& e) {
    promise(e.kind() == ErrorKind::usage);
  }
}

// A table that did not come from a fit, for every codec that learns one, and for one that does not.
void fuzz_tables(FuzzInput source) {
  static const std::vector<std::string> kSpecs = [] {
    std::vector<std::string> all = {"qsgd"};
    for (const CodecInfo& info : codecs())
      if (Codec::parse(info.name).traits().learns) all.insert(all.end(), info.specs.begin(), info.specs.end());
    return all;
  }();
  const Codec codec = Codec::parse(kSpecs[source.next<uint8_t>() % kSpecs.size()]);
  std::vector<uint32_t> table(source.next<uint8_t>() % 12);
  for (uint32_t& word : table) word = source.next<uint32_t>();
  try {
    const Codec fitted = codec.fitted(table);
    promise(fitted.table().size() == table.size());
    fitted.describe();
    std::vector<float> x(1100, 0.5f), y(1100);
    for (float& v : x) v = source.next<float>();
    const Plan plan({{"t", x.size(), DType::f32, fitted}});
    const auto runner = make_runner(plan, Device{});
    FuzzBytes message(plan.message_bytes());
    const void* in[] = {x.data()};
    void* out[] = {y.data()};
    runner->encode(in, {}, message);
    runner->decode(message, out);  // what we encode, we decode
    promise(decode(message, {}));
  } catch (const Error& e) {
    promise(e.kind() == ErrorKind::usage && e.field() == "table");
  }
}

void load_residuals(const FuzzBytes& bytes) {
  static const int file = ::memfd_create("residuals", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  promise(::ftruncate(file, 0) == 0 &&
          ::pwrite(file, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  try {
    const ErrorFeedback feedback = ErrorFeedback::load(path);
    promise(feedback.hash() == feedback.hash());
  } catch (const Error& e) {
    promise(e.kind() == ErrorKind::io || e.kind() == ErrorKind::usage);
  }
}

// The checksums of a residual file made right, as far as its own numbers can be followed; see feedback/residual_file.h.
void reseal_residuals(FuzzBytes& bytes) {
  store(bytes, 32, uint64_t{bytes.size()});
  const uint64_t entries = load<uint64_t>(bytes, 16), table = load<uint64_t>(bytes, 24),
                 width = load<uint32_t>(bytes, 12) == 0 ? 4 : 2;
  if (bytes.size() < 48 || table > bytes.size() - 48) return;
  const uint64_t parts[2] = {XXH64(bytes.data(), 40, 0), XXH64(bytes.data() + 48, table, 0)};
  store(bytes, 40, uint64_t{XXH64(parts, sizeof parts, 0)});
  size_t row = 48, body = 48 + table;
  for (uint64_t i = 0; i < entries && row + 24 <= 48 + table; ++i) {
    const uint64_t name = load<uint32_t>(bytes, row + 4), count = load<uint64_t>(bytes, row + 16);
    if (count > bytes.size()) return;
    const uint64_t size = (count * width + 7) / 8 * 8;
    if (body + size + 8 > bytes.size()) return;
    store(bytes, body + size, uint64_t{XXH64(bytes.data() + body, size, 0)});
    body += size + 8;
    row += 24 + (name + 7) / 8 * 8;
  }
}

void fuzz_residuals(const uint8_t* data, size_t size) {
  FuzzBytes bytes(size);
  std::memcpy(bytes.data(), data, size);
  load_residuals(bytes);
  reseal_residuals(bytes);
  load_residuals(bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  if (size >= 4 && std::memcmp(data, "GWIR", 4) == 0) {
    fuzz_message(data, size);
    return 0;
  }
  if (size >= 7 && std::memcmp(data, "gwresid", 7) == 0) {
    fuzz_residuals(data, size);
    return 0;
  }
  switch (data[0] % 5) {
    case 4:
      fuzz_tables({data + 1, size - 1});
      break;
    case 0:
      fuzz_message(data + 1, size - 1);
      break;
    case 1:
      fuzz_texts(std::string(reinterpret_cast<const char*>(data) + 1, size - 1));
      break;
    default:
      fuzz_mutated({data + 1, size - 1});
      break;
  }
  return 0;
}
