// SPDX-License-Identifier: Apache-2.0
// What no program should pass to the C interface: every function gets null pointers, wrong sizes, unknown names and
// noise, in all combinations. The answer is a code with words, and the process goes on. AddressSanitizer and
// UndefinedBehaviorSanitizer watch in `make dev`.
#include <limits>
#include <memory>

#include "gradwire/runner.h"
#include "public/c_api_fixture.h"

namespace gradwire {
namespace {

// Calls check(a, b, ...) for every combination of the values in the lists.
template <class Check>
void every_combination(const Check& check) {
  check();
}
template <class Check, class First, class... Rest>
void every_combination(const Check& check, const std::vector<First>& first, const std::vector<Rest>&... rest) {
  for (const First& value : first) every_combination([&](const Rest&... others) { check(value, others...); }, rest...);
}

// A call that must succeed where all arguments are good, and be refused in words otherwise.
void expect_answer(int code, bool good, const std::string& what) {
  if (good) {
    EXPECT_EQ(code, GW_OK) << what << ": " << gw_error();
    return;
  }
  EXPECT_EQ(code, GW_USAGE) << what << ": " << gw_error();
  EXPECT_STRNE(gw_error(), "") << what;
}

TEST(CApiBadInput, PlansInAllCombinations) {
  gw_plan* opened = nullptr;
  every_combination(
      [&](const char* codec, gw_plan** plan) {
        expect_answer(gw_plan_open(codec, plan), codec == std::string_view("onebit") && plan, "gw_plan_open");
        if (plan) gw_plan_close(*plan);
      },
      std::vector<const char*>{"onebit", "", "qsdg:bits=4", "qsgd:bits=99", "qsgd:bits=-1", "qsgd:bits", "1d=fp32",
                               "*=", ";;;", "qsgd:bits=4,bits=4", "\xff\xfe%n%s", "nonsense"},
      std::vector<gw_plan**>{&opened, nullptr});
  EXPECT_EQ(gw_plan_open(nullptr, &opened), GW_USAGE);
  EXPECT_EQ(opened, nullptr);

  every_combination(
      [](bool there, const char* name, int dtype, uint64_t count, int dimensions) {
        const PlanHandle plan("onebit", 3, "taken");
        const bool good =
            there && name == std::string("new") && dtype >= 0 && dtype <= 2 && count < 9 && dimensions >= 0;
        expect_answer(gw_plan_add(there ? plan.plan : nullptr, name, dtype, count, dimensions), good, "gw_plan_add");
      },
      std::vector<bool>{true, false}, std::vector<const char*>{"new", "taken"},
      std::vector<int>{GW_F32, GW_BF16, -1, 3, 1 << 30},
      std::vector<uint64_t>{0, 8, (uint64_t{1} << 40) + 1, UINT64_MAX}, std::vector<int>{0, 2, -1});
  const PlanHandle plan("onebit");
  expect_answer(gw_plan_add(plan, nullptr, GW_F32, 1, 1), false, "gw_plan_add without a name");
  size_t bytes = 0;
  every_combination([](gw_plan* p, size_t* b) { expect_answer(gw_plan_bytes(p, b), p && b, "gw_plan_bytes"); },
                    std::vector<gw_plan*>{plan, nullptr}, std::vector<size_t*>{&bytes, nullptr});
  gw_plan_close(nullptr);
  gw_reducer_close(nullptr);
}

TEST(CApiBadInput, MessagesInAllCombinations) {
  const PlanHandle handle("qsgd:bits=4"), longer("qsgd:bits=4", kCApiCount + 1),
      renamed("qsgd:bits=4", kCApiCount, "w");
  std::vector<float> values = c_api_gradient(0, 0), out(kCApiCount + 1);
  std::vector<std::byte> message = c_api_encode(handle, values), room(message.size());
  const size_t bytes = message.size();
  const void *good_in[] = {values.data()}, *null_in[] = {nullptr},
             *odd_in[] = {reinterpret_cast<const char*>(values.data()) + 1};
  void *good_out[] = {out.data()}, *null_out[] = {nullptr}, *odd_out[] = {reinterpret_cast<char*>(out.data()) + 1};
  size_t written = 0;
  every_combination(
      [&](gw_plan* plan, const void* const* tensors, void* to, size_t size, size_t* w) {
        const bool good = plan && tensors == good_in && to && size == bytes && w;
        expect_answer(gw_encode(plan, tensors, UINT64_MAX, UINT64_MAX, to, size, w), good, "gw_encode");
      },
      std::vector<gw_plan*>{handle, nullptr}, std::vector<const void* const*>{good_in, null_in, odd_in, nullptr},
      std::vector<void*>{room.data(), nullptr}, std::vector<size_t>{bytes, bytes - 1, 0},
      std::vector<size_t*>{&written, nullptr});
  every_combination(
      [&](gw_plan* plan, const void* const* tensors) {
        expect_answer(gw_plan_fit(plan, tensors), plan && tensors == good_in, "gw_plan_fit");
      },
      std::vector<gw_plan*>{handle, nullptr}, std::vector<const void* const*>{good_in, null_in, odd_in, nullptr});
  every_combination(
      [&](gw_plan* plan, const void* from, void* const* tensors) {
        const bool good = plan == handle.plan && from && tensors == good_out;
        expect_answer(gw_decode(plan, from, bytes, tensors), good, "gw_decode");
      },
      std::vector<gw_plan*>{handle, longer, renamed, nullptr}, std::vector<const void*>{message.data(), nullptr},
      std::vector<void* const*>{good_out, null_out, odd_out, nullptr});
  gw_info info{}, unset{};
  info.struct_bytes = sizeof info;
  every_combination(
      [&](const void* from, uint32_t tensor, gw_info* to) {
        expect_answer(gw_inspect(from, bytes, tensor, to), from && tensor == 0 && to == &info, "gw_inspect");
      },
      std::vector<const void*>{message.data(), nullptr}, std::vector<uint32_t>{0, 1, UINT32_MAX},
      std::vector<gw_info*>{&info, &unset, nullptr});
  EXPECT_EQ(gw_decode(handle, message.data(), 0, good_out), GW_MESSAGE);
  EXPECT_EQ(gw_inspect(message.data(), 0, 0, &info), GW_MESSAGE);
}

TEST(CApiBadInput, ReducersInAllCombinations) {
  const PlanHandle plan("onebit", 100, "w");
  gw_communicator alone = lone_communicator(), unset = alone, outside = alone, negative = alone, mute = alone,
                  nowhere = alone;
  unset.struct_bytes = 0;
  outside.rank = 1;
  negative.size = -1;
  mute.size = 2;
  nowhere.node = -1;
  gw_reducer* reducer = nullptr;
  every_combination(
      [&](const gw_communicator* communicator, const gw_plan* p, gw_reducer** to) {
        expect_answer(gw_reducer_open(communicator, p, to), communicator == &alone && p && to, "gw_reducer_open");
        if (to) gw_reducer_close(*to);
      },
      std::vector<const gw_communicator*>{&alone, &unset, &outside, &negative, &mute, &nowhere, nullptr},
      std::vector<const gw_plan*>{plan, nullptr}, std::vector<gw_reducer**>{&reducer, nullptr});

  // Every option with every value: it is refused at once or by the first step, or the step runs.
  uint64_t figure = 0;
  std::vector<float> in(101, 1.0f), out(101);
  for (const char* option : {"down", "method", "op", "feedback", "owner_feedback", "residual", "decay", "seed", "steps",
                             "threads", "nodes", "rate", "loss_scale", "colour", ""})
    for (const char* value : {"", "0", "1", "-1", "1e999", "nan", "inf", "99999999999999999999", "off", "sum", "auto",
                              "bf16", "gather", "fp32", "qsgd:bits=99", "\xff%s%n", " 1", "1 "}) {
      ASSERT_EQ(gw_reducer_open(&alone, plan, &reducer), GW_OK) << gw_error();
      const int set = gw_reducer_set(reducer, option, value);
      EXPECT_TRUE(set == GW_OK || (set == GW_USAGE && *gw_error())) << option << " = " << value << ": " << gw_error();
      const int ran = run_reducer(reducer, 0, in, out);
      EXPECT_TRUE(ran == GW_OK || (ran == GW_USAGE && *gw_error())) << option << " = " << value << ": " << gw_error();
      gw_reducer_close(reducer);
    }

  ASSERT_EQ(gw_reducer_open(&alone, plan, &reducer), GW_OK) << gw_error();
  expect_answer(gw_reducer_set(nullptr, "seed", "1"), false, "gw_reducer_set");
  expect_answer(gw_reducer_set(reducer, nullptr, "1"), false, "gw_reducer_set");
  expect_answer(gw_reducer_set(reducer, "seed", nullptr), false, "gw_reducer_set");
  expect_answer(gw_reducer_get(reducer, "skipped", &figure), false, "gw_reducer_get before the first step");
  expect_answer(gw_reducer_save(reducer, "anywhere"), false, "gw_reducer_save before the first step");
  const void *good_in[] = {in.data()}, *null_in[] = {nullptr}, *odd_in[] = {reinterpret_cast<char*>(in.data()) + 1};
  void *good_out[] = {out.data()}, *null_out[] = {nullptr}, *odd_out[] = {reinterpret_cast<char*>(out.data()) + 1};
  every_combination(
      [&](gw_reducer* r, const void* const* from, void* const* to) {
        expect_answer(gw_reducer_run(r, 0, from, to), r && from == good_in && to == good_out, "gw_reducer_run");
      },
      std::vector<gw_reducer*>{reducer, nullptr}, std::vector<const void* const*>{null_in, odd_in, nullptr, good_in},
      std::vector<void* const*>{null_out, odd_out, nullptr, good_out});
  every_combination(
      [&](gw_reducer* r, const char* name, uint64_t* to) {
        expect_answer(gw_reducer_get(r, name, to), r && to && name && name == std::string("message_bytes"), "get");
      },
      std::vector<gw_reducer*>{reducer, nullptr}, std::vector<const char*>{"message_bytes", "height", "", nullptr},
      std::vector<uint64_t*>{&figure, nullptr});
  EXPECT_EQ(gw_reducer_save(nullptr, "x"), GW_USAGE);
  EXPECT_EQ(gw_reducer_save(reducer, nullptr), GW_USAGE);
  EXPECT_EQ(gw_reducer_load(nullptr, "x"), GW_USAGE);
  EXPECT_EQ(gw_reducer_load(reducer, nullptr), GW_USAGE);
  EXPECT_EQ(gw_reducer_load(reducer, "/nowhere/at/all"), GW_IO);
  gw_reducer_close(reducer);
}

// Specs with noise in them are refused or, by luck, mean something.
TEST(CApiBadInput, NoisyTextsForCodecs) {
  std::mt19937_64 random(11);
  for (const CodecInfo& info : codecs())
    for (int round = 0; round < 200; ++round) {
      std::string text = info.example;
      for (uint64_t change = random() % 3 + 1; change > 0; --change) {
        const size_t at = random() % (text.size() + 1);
        if (random() % 2 || at == text.size())
          text.insert(at, 1, static_cast<char>(random() % 255 + 1));
        else
          text[at] = "0123456789:=,;*-."[random() % 17];
      }
      gw_plan* plan = nullptr;
      const int code = gw_plan_open(text.c_str(), &plan);
      ASSERT_TRUE(code == GW_OK || (code == GW_USAGE && !plan && *gw_error())) << text << ": " << gw_error();
      gw_plan_close(plan);
    }
}

// Values that training produces when it goes wrong.
TEST(CApiBadInput, StrangeValuesAreFittedAndEncoded) {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN(),
                  kHuge = std::numeric_limits<float>::max(), kTiny = std::numeric_limits<float>::denorm_min();
  for (const CodecInfo& info : codecs())
    for (const std::vector<float>& pattern : {std::vector<float>{kNan},
                                              {kInf, -kInf},
                                              {kHuge, -kHuge},
                                              {kTiny},
                                              {0.0f},
                                              {1.0f, kNan, kHuge, kTiny, -kInf}}) {
      std::vector<float> values(2000), back(2000);
      for (size_t i = 0; i < values.size(); ++i) values[i] = pattern[i % pattern.size()];
      const PlanHandle plan(info.example, values.size());
      const void* in[] = {values.data()};
      const int fitted = gw_plan_fit(plan, in);
      EXPECT_TRUE(fitted == GW_OK || *gw_error()) << info.example;
      const std::vector<std::byte> message = c_api_encode(plan, values);
      void* out[] = {back.data()};
      EXPECT_EQ(gw_decode(plan, message.data(), message.size(), out), GW_OK) << info.example << ": " << gw_error();
    }
}

// Every altered bit is noticed by one of the two checksums; what is cut or longer, by the sizes.
TEST(CApiBadInput, DamagedMessagesAreRefusedAndWriteNothing) {
  std::mt19937_64 random(5);
  const std::vector<float> values = c_api_gradient(0, 0);
  for (const CodecInfo& info : codecs()) {
    const PlanHandle plan(info.example);
    const std::vector<std::byte> whole = c_api_encode(plan, values);
    for (int round = 0; round < 400; ++round) {
      std::vector<std::byte> message = whole;
      const size_t head = std::min<size_t>(message.size(), 200);
      switch (round % 4) {
        case 0:  // one bit, often in the head
          message[random() % (round % 8 ? head : message.size())] ^= std::byte(1u << random() % 8);
          break;
        case 1:
          message.resize(random() % message.size());
          break;
        case 2:
          message.resize(message.size() + 1 + random() % 64);
          break;
        default: {  // eight bytes of noise, as in a field of the head
          const size_t at = random() % (message.size() - 8);
          const uint64_t noise = random() | 1;
          for (size_t i = 0; i < 8; ++i) message[at + i] ^= std::byte(noise >> (8 * i));
        }
      }
      std::vector<float> out(kCApiCount, 42.0f);
      void* tensors[] = {out.data()};
      // In memory of exactly this size, so that a tool that watches memory sees every byte that is read too many.
      const std::unique_ptr<std::byte[]> exact(new std::byte[std::max<size_t>(message.size(), 1)]);
      std::copy(message.begin(), message.end(), exact.get());
      ASSERT_EQ(gw_decode(plan, exact.get(), message.size(), tensors), GW_MESSAGE)
          << info.example << " round " << round << ": " << gw_error();
      ASSERT_EQ(out, std::vector<float>(kCApiCount, 42.0f)) << info.example << " round " << round;
      gw_info said{};
      said.struct_bytes = sizeof said;
      gw_inspect(exact.get(), message.size(), 0, &said);
    }
  }
}

TEST(CApiBadInput, TheTextOfAFailureBelongsToItsThread) {
  gw_plan* plan = nullptr;
  ASSERT_EQ(gw_plan_open("first", &plan), GW_USAGE);
  std::thread([&] {
    EXPECT_STREQ(gw_error(), "");
    gw_plan* another = nullptr;
    EXPECT_EQ(gw_plan_open("second", &another), GW_USAGE);
  }).join();
  EXPECT_NE(std::string(gw_error()).find("first"), std::string::npos) << gw_error();
  const std::string lengthy(5000, 'x');
  EXPECT_EQ(gw_fail(GW_ENGINE, lengthy.c_str()), GW_ENGINE);
  EXPECT_EQ(gw_error(), lengthy.substr(0, 1023));
  EXPECT_EQ(gw_fail(-17, gw_error() + 5), -17);
  gw_fail(GW_OK, nullptr);
  EXPECT_STREQ(gw_error(), "");
}

}  // namespace
}  // namespace gradwire
