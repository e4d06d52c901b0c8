// Calls Cadenza by generated stubs: streams an answer, reads an error's details, cancels, sets a deadline.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "cadenza-example/gen/cadenza/v1"
)

// request is a chat of one message, answered greedily. A field that is not set takes the server's default.
func request(prompt string) *pb.GenerateRequest {
	chat := &pb.Chat{Messages: []*pb.ChatMessage{{Role: "user", Content: proto.String(prompt)}}}
	return &pb.GenerateRequest{
		Prompt:         []*pb.PromptPart{{Part: &pb.PromptPart_Chat{Chat: chat}}},
		SamplingParams: &pb.SamplingParams{Temperature: proto.Float64(0), MaxTokens: proto.Uint32(64)},
	}
}

func endless(prompt string) *pb.GenerateRequest {
	endless := request(prompt)
	endless.SamplingParams.MaxTokens = proto.Uint32(1000)
	endless.SamplingParams.IgnoreEos = proto.Bool(true)
	return endless
}

// generate runs a request and hands its text to show; a stream that ends well is no error.
func generate(ctx context.Context, client pb.GenerationServiceClient, request *pb.GenerateRequest, show func(string)) error {
	stream, err := client.Generate(ctx, request)
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		for _, output := range response.Outputs {
			show(output.Text)
		}
	}
}

// showRefusal prints the details of an error, which are google.rpc messages; a wrong field is refused with its path.
func showRefusal(ctx context.Context, client pb.GenerationServiceClient, prompt string) {
	wrong := request(prompt)
	wrong.SamplingParams.TopP = proto.Float64(2)
	refusal := status.Convert(generate(ctx, client, wrong, func(string) {}))
	for _, detail := range refusal.Details() {
		if badRequest, ok := detail.(*errdetails.BadRequest); ok {
			for _, violation := range badRequest.FieldViolations {
				fmt.Printf("[%s] %s: %s\n", refusal.Code(), violation.Field, violation.Description)
			}
		}
	}
}

// stopEarly ends two calls before their requests: one when text arrives, one at its deadline.
func stopEarly(ctx context.Context, client pb.GenerationServiceClient, prompt string) {
	cancelled, cancel := context.WithCancel(ctx)
	defer cancel()
	err := generate(cancelled, client, endless(prompt), func(string) { cancel() })
	fmt.Printf("[%s]\n", status.Code(err))

	limited, release := context.WithTimeout(ctx, 50*time.Millisecond)
	defer release()
	err = generate(limited, client, endless(prompt), func(string) {})
	fmt.Printf("[%s]\n", status.Code(err))
}

func main() {
	target, prompt := "127.0.0.1:50051", "What is 27 + 48?"
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	if len(os.Args) > 2 {
		prompt = os.Args[2]
	}
	// From grpc-go 1.63 on: grpc.NewClient and grpc.WithTransportCredentials(insecure.NewCredentials()).
	connection, err := grpc.Dial(target, grpc.WithInsecure(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)),            // 4 MiB by default
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: time.Minute})) // off by default
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, client := context.Background(), pb.NewGenerationServiceClient(connection)

	if err := generate(ctx, client, request(prompt), func(text string) { fmt.Print(text) }); err != nil {
		log.Fatal(err)
	}
	fmt.Println()
	showRefusal(ctx, client, prompt)
	stopEarly(ctx, client, prompt)
}
