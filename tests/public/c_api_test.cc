// SPDX-License-Identifier: Apache-2.0
// The messages of the C interface against those of C++: the same bytes and the same values.
#include "gradwire/learn.h"
#include "gradwire/runner.h"
#include "gradwire/version.h"
#include "public/c_api_fixture.h"

namespace gradwire {
namespace {

TEST(CApi, SaysTheVersionOfTheLibrary) { EXPECT_EQ(gw_version(), kVersionString); }

TEST(CApi, EveryCodecGivesTheBytesAndTheValuesOfCpp) {
  const std::vector<float> values = c_api_gradient(0, 0);
  for (const CodecInfo& info : codecs()) {
    for (const bool fitted : {false, true}) {
      Codec codec = Codec::parse(info.example);
      if (fitted) codec = fit(codec, values.data(), kCApiCount, DType::f32);
      const Plan plan({{.name = "", .count = kCApiCount, .codec = codec}});
      const auto runner = make_runner(plan, Device{});
      std::vector<std::byte> expected(plan.message_bytes());
      const void* in[] = {values.data()};
      runner->encode(in, Stamp{.seed = 1, .step = 7}, expected);
      std::vector<float> back(kCApiCount), again(kCApiCount);
      void* out[] = {back.data()};
      runner->decode(expected, out);

      const PlanHandle handle(info.example);
      if (fitted) {
        ASSERT_EQ(gw_plan_fit(handle, in), GW_OK) << gw_error();
      }
      const std::vector<std::byte> message = c_api_encode(handle, values);
      EXPECT_EQ(message, expected) << info.example;
      EXPECT_EQ(c_api_encode(handle, values), expected) << info.example << ": a plan may be used again";
      gw_info said{};
      said.struct_bytes = sizeof said;
      ASSERT_EQ(gw_inspect(message.data(), message.size(), 0, &said), GW_OK) << gw_error();
      EXPECT_EQ(said.codec, codec.wire_spec());
      EXPECT_EQ(said.count, kCApiCount);
      EXPECT_EQ(said.step, 7u);
      EXPECT_EQ(said.tensors, 1u);
      // A message may stand anywhere, also where words do not, and any plan of this tensor decodes it.
      const PlanHandle receiver("fp32");
      std::vector<std::byte> shifted(message.size() + 1);
      std::copy(message.begin(), message.end(), shifted.begin() + 1);
      void* received[] = {again.data()};
      ASSERT_EQ(gw_decode(receiver, shifted.data() + 1, message.size(), received), GW_OK) << gw_error();
      EXPECT_EQ(std::memcmp(back.data(), again.data(), kCApiCount * sizeof(float)), 0) << info.example;
      size_t written = 0;
      ASSERT_EQ(gw_encode(handle, in, 7, 1, shifted.data() + 1, message.size(), &written), GW_OK) << gw_error();
      EXPECT_EQ(std::memcmp(shifted.data() + 1, message.data(), message.size()), 0) << info.example;
    }
  }
}

TEST(CApi, SeveralTensorsShareAMessage) {
  const std::vector<float> weight = c_api_gradient(0, 0), bias(7, 0.25f);
  gw_plan* plan = nullptr;
  ASSERT_EQ(gw_plan_open("1d=fp32;*=onebit", &plan), GW_OK) << gw_error();
  ASSERT_EQ(gw_plan_add(plan, "weight", GW_F32, weight.size(), 2), GW_OK) << gw_error();
  ASSERT_EQ(gw_plan_add(plan, "bias", GW_F32, bias.size(), 1), GW_OK) << gw_error();
  const Plan expected({{.name = "weight", .count = weight.size(), .codec = Codec::parse("onebit")},
                       {.name = "bias", .count = bias.size(), .codec = Codec::parse("fp32")}});
  const void* in[] = {weight.data(), bias.data()};
  std::vector<std::byte> bytes(expected.message_bytes()), message(bytes.size());
  make_runner(expected, Device{})->encode(in, Stamp{.seed = 4, .step = 2}, bytes);
  size_t written = 0;
  ASSERT_EQ(gw_encode(plan, in, 2, 4, message.data(), message.size(), &written), GW_OK) << gw_error();
  EXPECT_EQ(message, bytes);
  gw_info said{};
  said.struct_bytes = sizeof said;
  ASSERT_EQ(gw_inspect(message.data(), written, 1, &said), GW_OK) << gw_error();
  EXPECT_EQ(said.tensors, 2u);
  EXPECT_EQ(said.count, 7u);
  std::vector<float> back(weight.size()), bias_back(7);
  void* out[] = {back.data(), bias_back.data()};
  ASSERT_EQ(gw_decode(plan, message.data(), written, out), GW_OK) << gw_error();
  EXPECT_EQ(bias_back, bias);

  // A tensor more makes it another plan, whose messages are longer and which refuses the old ones.
  ASSERT_EQ(gw_plan_add(plan, "more", GW_F32, 1, 1), GW_OK) << gw_error();
  size_t longer = 0;
  ASSERT_EQ(gw_plan_bytes(plan, &longer), GW_OK) << gw_error();
  EXPECT_GT(longer, written);
  void* three[] = {back.data(), bias_back.data(), bias_back.data()};
  EXPECT_EQ(gw_decode(plan, message.data(), written, three), GW_USAGE);
  EXPECT_NE(std::string(gw_error()).find("2 tensors"), std::string::npos) << gw_error();
  gw_plan_close(plan);
}

TEST(CApi, OtherTypesOfElements) {
  const std::vector<uint16_t> halves(100, 0x3c00);  // 1.0
  const PlanHandle plan("fp16", 100, "", GW_F16), floats("fp16", 100);
  const std::vector<std::byte> message = c_api_encode(plan, halves);
  std::vector<uint16_t> back(100);
  void* out[] = {back.data()};
  ASSERT_EQ(gw_decode(plan, message.data(), message.size(), out), GW_OK) << gw_error();
  EXPECT_EQ(back, halves);
  std::vector<float> wide(100);
  out[0] = wide.data();
  ASSERT_EQ(gw_decode(floats, message.data(), message.size(), out), GW_OK) << gw_error();
  EXPECT_EQ(wide, std::vector<float>(100, 1.0f));
}

TEST(CApi, AFittedCodecEncodesBetter) {
  std::vector<float> values = c_api_gradient(0, 0);
  for (float& value : values) value = value * value * value;
  const auto error = [&](bool fitted) {
    const PlanHandle plan("optquant:bits=3");
    const void* in[] = {values.data()};
    if (fitted) {
      EXPECT_EQ(gw_plan_fit(plan, in), GW_OK) << gw_error();
    }
    const std::vector<std::byte> message = c_api_encode(plan, values);
    std::vector<float> back(kCApiCount);
    void* out[] = {back.data()};
    EXPECT_EQ(gw_decode(plan, message.data(), message.size(), out), GW_OK) << gw_error();
    double sum = 0;
    for (size_t i = 0; i < kCApiCount; ++i) sum += (values[i] - back[i]) * (values[i] - back[i]);
    return sum;
  };
  EXPECT_LT(error(true), error(false));
}

TEST(CApi, NoElementsNeedNoMemory) {
  for (const CodecInfo& info : codecs()) {
    const PlanHandle plan(info.example, 0);
    std::vector<std::byte> message(4096);
    size_t written = 0;
    EXPECT_EQ(gw_plan_fit(plan, nullptr), GW_OK) << info.example << ": " << gw_error();
    ASSERT_EQ(gw_encode(plan, nullptr, 0, 0, message.data(), message.size(), &written), GW_OK) << gw_error();
    EXPECT_EQ(gw_decode(plan, message.data(), written, nullptr), GW_OK) << info.example << ": " << gw_error();
  }
}

}  // namespace
}  // namespace gradwire
